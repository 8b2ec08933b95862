"""Lightning's checkpoints of one file, written whole, and errors that say of which checkpoint they speak."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from rlobjectives.distributed.ending import is_lost
from rlobjectives.errors import CheckpointError, RLObjectivesError
from rlobjectives.integrations.whole_files import clear_partials, replacing

__all__ = ["WholeCheckpointIO", "beside", "first_line", "is_local", "naming_reads", "naming_writes"]


def is_local(path: Any) -> bool:
    """Whether a path is on this machine, and no address of a store elsewhere."""
    return "://" not in str(path)


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints of one file: whole or not there, without a copy in memory, and errors are raised.

    Lightning's own writer takes a folder that cannot be written for a success.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file beside `path`, put it on the disk, and move it into place.

        Raises:
            CheckpointError: If it cannot be written. What was there before is untouched.
        """
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        with naming_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_partials(path)
            with replacing(path) as temporary:
                torch.save(checkpoint, temporary)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, with the rollout that may lie beside it."""
        super().remove_checkpoint(path)
        if is_local(path):
            shutil.rmtree(beside(Path(path)), ignore_errors=True)


def beside(path: Path) -> Path:
    """The folder for the rollouts in use of several ranks whose checkpoint is one file."""
    return path.with_name(f"{path.name}.rollout")


@contextlib.contextmanager
def naming_writes(path: Path) -> Iterator[None]:
    """Say of which checkpoint an error speaks; of a rank that is lost meanwhile, its own words are asked for elsewhere."""
    try:
        yield
    except RLObjectivesError:
        raise
    # torch's writer raises a RuntimeError where the disk is full, and its distributed one what no `except Exception` sees.
    except (OSError, RuntimeError, CheckpointException) as error:
        if is_lost(error):
            raise
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be written: {_cause(error)}. What was there before is untouched. Free "
            "space or give a folder that can be written."
        ) from error


@contextlib.contextmanager
def naming_reads(path: Any) -> Iterator[None]:
    """Turn what loading raises into what is wrong with the checkpoint; but for a rank that is lost meanwhile."""
    try:
        yield
    except RLObjectivesError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} holds objects that only run code can make, and was not loaded. If you trust it, give "
            f"weights_only=False. ({first_line(error)})"
        ) from error
    except (RuntimeError, LookupError, EOFError, ValueError, OSError, CheckpointException) as error:
        if is_lost(error):
            raise
        raise CheckpointError(f"checkpoint {str(path)!r} cannot be loaded: {_cause(error, 3)}.") from error


def first_line(error: BaseException, lines: int = 1) -> str:
    """What an error says, shortened to so many lines."""
    text = str(error).strip() or type(error).__name__
    return " ".join(line.strip() for line in text.splitlines()[:lines])[:400].rstrip(".")


def _cause(error: BaseException, lines: int = 1) -> str:
    """An error in words; of several ranks at once, what happened on the first."""
    if isinstance(error, CheckpointException):
        rank, (found, _) = min(error.failures.items())
        return f"on rank {rank}, {type(found).__name__}: {first_line(found, lines)}"
    return first_line(error, lines)
