"""A run whose ranks end together: whatever ends one of them, wherever in Lightning, the others hear of it."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from lightning.pytorch import Callback

from rlobjectives.distributed.ending import tell, watched

__all__ = ["EndTogether"]

_LOG = logging.getLogger("rlobjectives")


class EndTogether(Callback):
    """Tells the other ranks of an exception that ends this one, and lets none of them wait for it.

    `ObjectiveMixin` adds it to every run. It covers what happens outside a training step too: data, callbacks,
    checkpoints.
    """

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to listen."""
        del trainer, pl_module, stage
        self._open.close()
        self._open.enter_context(watched(new_run=True))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop listening."""
        del trainer, pl_module, stage
        self._open.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell the others why this rank ends, or say here why they have."""
        del trainer, pl_module
        instead = tell(exception)
        if instead is not None:  # this exception only says that a connection was lost
            _LOG.error("%s", instead)
        self._open.close()
