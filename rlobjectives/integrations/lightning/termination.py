"""SIGTERM under Lightning on several ranks: all of them end after the same rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rlobjectives.distributed import Communicator

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Termination"]


class Termination:
    """Notes a SIGTERM, and stops training on all ranks once they have agreed that one of them got it.

    Lightning's own handler broadcasts from within the signal (2.6): a rank that is interrupted between two collectives
    meets another rank's collective with it, and both wait for ever. Here the handler only notes the signal. The ranks
    agree at the end of each rollout, and then Lightning stops all of them as it would a single process: checkpoints
    that are due are written, ``on_exception`` runs, and `SIGTERMException` ends the process.

    Args:
        trainer: Before it starts to listen to signals: in ``setup``. Of a single process nothing changes.

    Attributes:
        asked: Whether this rank was told to end.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.asked = False
        self._signals = cast("Any", trainer._signal_connector)
        if trainer.world_size > 1:
            self._signals._sigterm_notifier_fn = self._note

    def agree(self, communicator: Communicator) -> None:
        """Stop after this batch if any rank was told to end. One collective; all ranks call it together."""
        if self.trainer.world_size == 1:
            return
        asked = communicator.gather(torch.tensor([float(self.asked)]))
        if bool(asked.any()):
            self._signals.received_sigterm = True

    def _note(self, signum: int, frame: object) -> None:
        del frame
        launcher: Any = self.trainer.strategy.launcher
        if (
            launcher is not None and not self.asked
        ):  # the first process passes it on to those that it has started
            launcher.kill(signum)
        self.asked = True
