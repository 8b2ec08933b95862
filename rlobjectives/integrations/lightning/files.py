"""Folders that every rank knows to be writable before hours are spent on what goes there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from rlobjectives.distributed import Communicator, raised_together
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.checkpoint_io import is_local
from rlobjectives.integrations.lightning.checkpoints import writes_folders
from rlobjectives.integrations.lightning.resuming import ResumableRollouts
from rlobjectives.integrations.whole_files import probe

__all__ = ["check_folders", "refuse_folders"]


def refuse_folders(trainer: Any) -> None:
    """Try to write to every folder that the trainer will write to from this rank. No collective.

    Each rank has its own list: loggers, and callbacks that only write, are often given to rank 0 alone.

    Args:
        trainer: At set-up.

    Raises:
        CapabilityError: If a folder cannot be written; the caller tells the other ranks.
    """
    for who, folder in _folders(trainer):
        _refuse(who, folder)


def check_folders(
    who: str, folders: Sequence[Path], *, writes: bool, module: object = None, stage: str = ""
) -> None:
    """Try to write to folders of a callback, at its set-up. One collective.

    None where `ObjectiveMixin` tries them in its own set-up, with all others: at ``"fit"``.

    Args:
        who: What will write, as the message calls it.
        folders: Where.
        writes: Whether this rank is one that does; the others wait for its verdict.
        module: That of the callback's set-up.
        stage: That of the callback's set-up.

    Raises:
        CapabilityError: If this rank cannot write. The other ranks raise a `RankError`.
    """
    if stage == "fit" and isinstance(module, ResumableRollouts):
        return
    with raised_together(Communicator.world()):
        for folder in folders if writes else ():
            _refuse(who, folder)


def _refuse(who: str, folder: Path) -> None:
    try:
        probe(folder)
    except OSError as error:
        raise CapabilityError(
            f"{who} cannot write to {str(folder)!r}: {error.strerror or error}. Give a folder that can be written."
        ) from error


def _folders(trainer: Any) -> Iterator[tuple[str, Path]]:
    """Where this rank will write on this machine, and who does."""
    first = trainer.is_global_zero
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpoint):
            given = getattr(callback, "dirpath", None)
            found = [given] if given and (first or writes_folders(trainer.strategy)) else []
        else:
            found = getattr(callback, "folders", lambda _: [])(trainer) if first else []
        yield from ((type(callback).__name__, Path(os.fspath(one))) for one in found if is_local(one))
    # On another rank a logger would take rank 0's folder for that of an earlier run, and count one version on.
    for logger in trainer.loggers if first else ():
        given = logger.log_dir or logger.save_dir
        if given and is_local(given):
            yield type(logger).__name__, Path(os.fspath(given))
