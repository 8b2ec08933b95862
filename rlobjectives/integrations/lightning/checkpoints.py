"""Checkpoints of a Lightning trainer: written under another name first, marked whole, and verified before loading."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.distributed.checkpoint.api import CheckpointException

from rlobjectives.distributed import Communicator, Fault
from rlobjectives.distributed.synchronize import exchange, raised_together
from rlobjectives.errors import CheckpointError
from rlobjectives.integrations.checkpoint_files import BEGUN, MARKER, begin, finish, refusal, trouble_with
from rlobjectives.integrations.lightning.checkpoint_io import (
    WholeCheckpointIO,
    beside,
    first_line,
    is_local,
    naming_reads,
    naming_writes,
)
from rlobjectives.integrations.whole_files import clear_partials, replacing, siblings

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rlobjectives.integrations.lightning.host import TrainedModule

__all__ = ["guard_checkpoints", "writes_folders"]

_KEY = "rlobjectives"


def writes_folders(strategy: Any) -> bool:
    """Whether every rank writes its own files, into a folder."""
    if isinstance(strategy, ModelParallelStrategy):
        return bool(strategy._save_distributed_checkpoint)
    return isinstance(strategy, DeepSpeedStrategy)


def guard_checkpoints(module: TrainedModule, trainer: Trainer) -> CheckpointGuard:
    """Have a trainer write whole checkpoints and load no others; the second time, what it has already.

    Args:
        module: Whose rollout in use goes into checkpoints.
        trainer: Whose strategy writes and loads them.
    """
    strategy: Any = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = WholeCheckpointIO()
    guard: CheckpointGuard | None = getattr(strategy, "rlobjectives_guard", None)
    if guard is None:
        guard = strategy.rlobjectives_guard = CheckpointGuard(module, trainer)
    guard.module = module
    return guard


class CheckpointGuard:
    """Stands before a strategy's methods that write and load checkpoints.

    Args:
        module: Whose rollout in use goes into checkpoints.
        trainer: Whose strategy it is.

    Attributes:
        has_fitted: Whether the trainer has been used for training.
        has_begun: Whether training has begun, so that there is something to save after an error.
        run: What tells this call of ``fit`` from others, the same on all ranks.
    """

    def __init__(self, module: TrainedModule, trainer: Trainer) -> None:
        self.module = module
        self.trainer = trainer
        self.has_fitted = False
        self.has_begun = False
        self.run = ""
        self.strategy: Any = trainer.strategy
        self._save = self.strategy.save_checkpoint
        self._load = self.strategy.load_checkpoint
        self._load_weights = self.strategy.load_model_state_dict
        vars(self.strategy).update(
            save_checkpoint=self.save, load_checkpoint=self.load, load_model_state_dict=self.load_weights
        )

    # Writing.

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, whole or not at all.

        Raises:
            CheckpointError: If it cannot be written; the other ranks raise a `RankError`.
        """
        if self._is_ending_early():
            warnings.warn(
                f"checkpoint {str(filepath)!r} was not written: the run ended with an error before the first step, and its "
                "weights would replace those of a trained model.",
                stacklevel=2,
            )
            return
        if storage_options is None and is_local(filepath) and writes_folders(self.strategy):
            self._save_folder(checkpoint, filepath)
            return
        # After an error ranks may be anywhere, and only a strategy that shards needs the others.
        fault, together = Fault(), self.trainer.state.status != TrainerStatus.INTERRUPTED
        with fault.guard():
            self._put_rollout(checkpoint, filepath)
            self._save(checkpoint, filepath, storage_options=storage_options)
        if together:
            exchange({}, Communicator.world(), fault=fault)
        elif fault.error is not None:
            raise fault.error
        if getattr(self.strategy, "local_rank", 0) == 0:
            self._forget_rollouts(checkpoint, filepath)

    def _is_ending_early(self) -> bool:
        """Whether an error before the first step, such as a refused checkpoint, has callbacks save what they can.

        Who asks for a checkpoint once the trainer is through with the error means it.
        """
        state = self.trainer.state
        failed = state.status == TrainerStatus.INTERRUPTED and state.fn == TrainerFn.FITTING
        return failed and state.stage is not None and not self.has_begun

    def _put_rollout(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """This rank's part of the rollout in use: in the checkpoint of a single rank, else in a file beside it."""
        header = checkpoint.get(_KEY, {}).get("unfinished")
        if header is None or header["trouble"]:
            return
        if header["ranks"] == 1:
            header["here"] = self.module.unfinished_here()
            return
        if not is_local(filepath):
            header["trouble"] = (
                "the rollouts of several ranks are not stored with a checkpoint on another machine"
            )
            return
        header["run"] = self.run
        _write_rollout(
            _file_beside(filepath, header, self.strategy.global_rank), self.module.unfinished_here()
        )

    def _forget_rollouts(self, checkpoint: Mapping[str, Any], filepath: Any) -> None:
        """Remove rollouts of the checkpoint that stood here before."""
        if not is_local(filepath):
            return
        folder, header = beside(Path(filepath)), checkpoint.get(_KEY, {}).get("unfinished")
        if header is None or header["ranks"] == 1:
            shutil.rmtree(folder, ignore_errors=True)
            return
        for file in folder.glob("*.pt") if folder.is_dir() else ():
            if not file.name.startswith(_save_of(header)):
                file.unlink(missing_ok=True)

    def _save_folder(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        path, token = self.strategy.broadcast((str(filepath), secrets.token_hex(4)))
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial-{token}")
        world = Communicator.world()
        first, first_here = self.strategy.global_rank == 0, self.strategy.local_rank == 0
        with _removed_on_failure(partial, here=first_here), raised_together(world), naming_writes(path):
            if first:
                clear_partials(path)
                begin(partial)
        with _removed_on_failure(partial, here=first_here), raised_together(world), naming_writes(path):
            partial.mkdir(parents=True, exist_ok=True)  # where machines do not share their disks
            # Asked now: once rank 0 has renamed the folder, a network disk may show the old name for seconds.
            first_on_its_disk = first_here and not first and not (partial / BEGUN).exists()
            header = checkpoint.get(_KEY, {}).get("unfinished")
            if header is not None and not header["trouble"]:
                _write_rollout(
                    _file_inside(partial, self.strategy.global_rank), self.module.unfinished_here()
                )
            if _KEY in checkpoint:
                checkpoint[_KEY]["marked"] = True
        try:
            with naming_writes(path):  # the ranks meet inside: one that fails cannot wait for them here
                self._save(checkpoint, partial)
        except CheckpointError as error:
            if first_here and isinstance(
                error.__cause__, CheckpointException
            ):  # of all ranks: nobody writes any more
                shutil.rmtree(partial, ignore_errors=True)
            raise
        for mine in (first, first_on_its_disk):
            with _removed_on_failure(partial, here=mine), raised_together(world), naming_writes(path):
                if mine:
                    finish(partial)
                    _put_in_place(partial, path)

    # Loading.

    def load(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify a checkpoint and load it, without running code that a pickle may hold unless that was asked for.

        Raises:
            CheckpointError: If it is half, damaged, empty, or no checkpoint of Lightning; with the one to take instead.
        """
        world = Communicator.world()
        with raised_together(world):
            first_here = getattr(self.strategy, "local_rank", 0) == 0
            if is_local(checkpoint_path) and first_here:
                _check_whole(Path(checkpoint_path))
        safe = True if weights_only is None else weights_only
        loaded: dict[str, Any] = {}
        with raised_together(world, collectives_inside=True), naming_reads(checkpoint_path):
            loaded = self._load(checkpoint_path, weights_only=safe)
            if not isinstance(loaded, dict) or "pytorch-lightning_version" not in loaded:
                raise CheckpointError(
                    f"checkpoint {str(checkpoint_path)!r} is no checkpoint of a Lightning trainer."
                )
            self._get_rollout(loaded, checkpoint_path)
        return loaded

    def _get_rollout(self, loaded: dict[str, Any], path: Any) -> None:
        saved = loaded.get(_KEY) or {}
        if saved.get("marked") and is_local(path) and not (Path(path) / MARKER).is_file():
            raise CheckpointError(
                f"checkpoint {str(path)!r} has lost its marker, so nobody can tell whether it is whole."
            )
        header = saved.get("unfinished")
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if (
            header is None
            or header["trouble"]
            or header["ranks"] != self.trainer.world_size
            or "here" in header
        ):
            return
        rank = self.strategy.global_rank
        file = _file_inside(Path(path), rank) if saved.get("marked") else _file_beside(path, header, rank)
        if trouble := trouble_with(file):
            raise CheckpointError(
                f"checkpoint {str(path)!r} was made between two optimizer steps of a rollout, and this rank's part of it, "
                f"{str(file)!r}, {trouble}. Restore it; a checkpoint is moved together with the folder beside it."
            )
        header["here"] = torch.load(file, map_location="cpu", weights_only=True)

    def load_weights(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights.

        Raises:
            CheckpointError: If they are of another model.
        """
        try:
            self._load_weights(checkpoint, strict=strict)
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint's weights are not those of {type(self.module).__name__}: {first_line(error, 3)}. Give the "
                "checkpoint of a run with this model."
            ) from error


def _file_beside(path: Any, header: Mapping[str, Any], rank: int) -> Path:
    """Named by run and step, so that the rollout of the file that is being replaced stays until it is."""
    resolved = Path(path).resolve() if Path(path).exists() else Path(path)
    return beside(resolved) / f"{_save_of(header)}{rank}.pt"


def _save_of(header: Mapping[str, Any]) -> str:
    """How the names of all ranks' files of one checkpoint begin; nothing of another run begins so."""
    return f"{header['step']}-{header.get('run', '')}_"


def _file_inside(folder: Path, rank: int) -> Path:
    return folder / f"rollout_{rank}.pt"


def _write_rollout(file: Path, state: Mapping[str, Any]) -> None:
    with replacing(file) as temporary:
        torch.save(dict(state), temporary)


def _check_whole(path: Path) -> None:
    trouble = trouble_with(path)
    if not trouble:
        return
    asides = () if path.exists() else siblings(path, ".replaced-*")
    whole = next((aside for aside in asides if not trouble_with(aside)), None)
    if whole is not None:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was being replaced when its run died. The one before is whole: rename "
            f"{str(whole)!r} to {path.name!r}."
        )
    raise refusal(path, trouble, _earlier(path))


def _earlier(path: Path) -> Iterable[Path]:
    """Checkpoints beside this one, the newest first."""
    own = path.stat().st_mtime if path.exists() else float("inf")
    others = [other for other in path.parent.glob("[!.]*.ckpt") if other != path and other.exists()]
    dated = sorted(((other.stat().st_mtime, other) for other in others), reverse=True)
    return [other for when, other in dated if when <= own or not path.exists()]


def _put_in_place(partial: Path, path: Path) -> None:
    """Move a folder that is whole to its name; what was there is put aside first, and removed last."""
    before = path.with_name(f".{path.name}.replaced-{secrets.token_hex(4)}")
    replaced = path.exists() or path.is_symlink()
    if replaced:
        path.rename(before)
    try:
        partial.rename(path)
    except OSError:
        if replaced:
            before.rename(path)
        raise
    for aside in siblings(path, ".replaced-*"):  # of a run that was killed, too
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()


@contextlib.contextmanager
def _removed_on_failure(folder: Path, *, here: bool) -> Iterator[None]:
    """Remove a folder after an error that all ranks raise."""
    try:
        yield
    except Exception:
        if here:
            shutil.rmtree(folder, ignore_errors=True)
        raise
