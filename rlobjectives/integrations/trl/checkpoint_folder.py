"""Checkpoint folders of a TRL trainer: begun, finished, and the last whole one to resume from."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer

from rlobjectives.distributed import Communicator, raised_together
from rlobjectives.distributed.faults import in_words
from rlobjectives.errors import CheckpointError, RLObjectivesError
from rlobjectives.integrations.checkpoint_files import MARKER, begin, finish, refusal, trouble_with
from rlobjectives.integrations.trl.together import raise_together, said_by_ranks
from rlobjectives.integrations.whole_files import probe

__all__ = ["check_output_folder", "checkpoint_to_resume", "written_whole"]

_NAME = re.compile(r"^checkpoint-(\d+)$")
_STATE = "trainer_state.json"
ROLLOUTS = "rollout_*.pt"
"""What may be deleted from a checkpoint, to sample a new rollout in place of the one in use."""


def check_output_folder(args: Any) -> None:
    """Refuse an output folder that cannot be written, before hours are spent. All ranks call it together.

    Raises:
        CapabilityError: On all ranks, with the rank and the reason.
    """
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        return
    trouble = None
    try:
        probe(Path(args.output_dir))
    except OSError as error:
        trouble = (
            f"output_dir {args.output_dir!r} cannot be written: {error.strerror or error}. Give a folder that can be "
            "written, or save_strategy='no'"
        )
    raise_together(trouble and f"{trouble}.")


@contextmanager
def written_whole(trainer: Any, folder: Path) -> Iterator[None]:
    """Write a checkpoint inside; it is marked whole after, and only then older ones are removed.

    All ranks enter and leave together. What stands before a collective of the Trainer's own fails there, too.

    Args:
        trainer: Whose checkpoint it is.
        folder: The checkpoint.

    Raises:
        CheckpointError: If this rank cannot write; the others raise a `RankError`. Older checkpoints are untouched.
    """
    args = trainer.args
    with _together(folder):
        if _first_here(args):
            begin(folder)
    kept = args.save_total_limit, args.push_to_hub
    args.save_total_limit, args.push_to_hub = None, False  # both come after the marker
    meets = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.state.best_global_step
    try:
        with _together(folder, collectives_inside=bool(meets) and args.world_size > 1):
            yield
    finally:
        args.save_total_limit, args.push_to_hub = kept
    with _together(folder):
        if args.process_index == 0:
            finish(folder, removable=ROLLOUTS)
    with _together(folder):  # machines that do not share their disks
        if _first_here(args) and not (folder / MARKER).is_file():
            finish(folder, removable=ROLLOUTS)
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))
    if args.should_save:
        _rotate(trainer, folder.parent)


def checkpoint_to_resume(trainer: Any, chosen: str | bool | None) -> str | None:
    """The checkpoint that ``resume_from_checkpoint`` stands for, verified. All ranks call it together.

    Args:
        trainer: Before training.
        chosen: A path; or True for the last whole one, with a warning that names those passed over.

    Raises:
        CheckpointError: On all ranks, if the path is half, damaged, empty or no checkpoint, with the one to take instead;
            or if there is no whole one.
    """
    if chosen is None or chosen is False:
        return None
    if chosen is not True:
        path = Path(chosen)
        if verdict := _verdict(trainer, path):
            raise refusal(path, verdict, _earlier(path))
        return str(path)
    folder = Path(trainer.args.output_dir)
    names: list[str] = said_by_ranks([str(path) for path in _newest_first(folder)])[0]
    passed: list[str] = []
    for name in names:
        if not (verdict := _verdict(trainer, Path(name))):
            if passed:
                warnings.warn(
                    f"resume_from_checkpoint=True goes on from {name!r}, the last whole checkpoint; passed over: "
                    f"{'; '.join(passed)}.",
                    stacklevel=3,
                )
            return name
        passed.append(f"{name!r} {verdict}")
    found = "; ".join(passed) or "there is none"
    raise CheckpointError(
        f"resume_from_checkpoint=True finds no whole checkpoint in {str(folder)!r}: {found}."
    )


def _verdict(trainer: Any, path: Path) -> str:
    """What any rank finds wrong with a checkpoint; empty if nothing."""
    mine = ""
    if _first_here(trainer.args):
        mine = trouble_with(path)
        if not mine and path.is_dir() and not (path / _STATE).is_file():
            mine = f"is no checkpoint of a Trainer: it has no {_STATE!r}"
        if not mine and not path.is_dir():
            mine = "is a file; a Trainer's checkpoint is a folder"
    return next((verdict for verdict in said_by_ranks(mine) if verdict), "")


@contextmanager
def _together(folder: Path, *, collectives_inside: bool = False) -> Iterator[None]:
    """What goes wrong while writing on one rank ends all of them; it is named where only this rank can have failed."""
    with raised_together(Communicator.world(), collectives_inside=collectives_inside):
        try:
            yield
        except RLObjectivesError:
            raise
        except Exception as error:
            if collectives_inside:  # perhaps that another rank is gone
                raise
            text = " ".join(in_words(error).split())[:300]
            raise CheckpointError(
                f"checkpoint {str(folder)!r} could not be written: {text}. Older checkpoints are untouched. Free space, "
                "or give an output_dir that can be written."
            ) from error


def _first_here(args: Any) -> bool:
    return bool(args.local_process_index == 0)


def _newest_first(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob("*") if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def _earlier(path: Path) -> list[Path]:
    match = _NAME.match(path.name)
    if match is None or not path.parent.is_dir():
        return []
    older: Callable[[Path], bool] = lambda other: int(other.name.rsplit("-", 1)[1]) < int(match[1])  # noqa: E731
    return [other for other in _newest_first(path.parent) if older(other)]


def _rotate(trainer: Any, run_folder: Path) -> None:
    """Remove the oldest checkpoints, as the Trainer itself would have done before the new one was whole."""
    if hasattr(trainer, "_rotate_checkpoints"):  # transformers 4
        trainer._rotate_checkpoints(use_mtime=True, output_dir=str(run_folder))
        return
    transformers.trainer.rotate_checkpoints(
        output_dir=str(run_folder),
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )
