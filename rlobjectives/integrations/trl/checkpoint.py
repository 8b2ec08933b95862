"""The rollout in use as a part of a checkpoint, and whether it still fits the run that resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.checkpoint_files import MARKER, trouble_with
from rlobjectives.integrations.trl.together import said_by_ranks
from rlobjectives.integrations.whole_files import replacing

if TYPE_CHECKING:
    from rlobjectives.integrations.trl.sampling import SamplingMixin

__all__ = ["Rollout", "differences", "load_rollout", "rollout_file", "save_rollout", "settings"]

_SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
)
# What log-probabilities of the same weights, or a step with the same gradient, depend on.
_STEP = ("temperature", "bf16", "fp16", "disable_dropout", "neftune_noise_alpha", "max_grad_norm")


Setting = str | int | float | bool | None


def settings(objective: Any, config: Any) -> dict[str, Setting]:
    """What the next step on a half-used rollout depends on: how it was cut, judged and scored, and by how many ranks."""
    sizes = {name: int(getattr(config, name)) for name in _SIZES}
    step: dict[str, Setting] = {name: getattr(config, name, None) for name in _STEP}
    return {"objective": objective.description, **sizes, **step, "world_size": int(config.world_size)}


def differences(stored: Mapping[str, Setting], now: Mapping[str, Setting]) -> str:
    """What changed, in words; empty where nothing did.

    Example:
        >>> differences({"num_iterations": 2, "world_size": 8}, {"num_iterations": 1, "world_size": 8})
        'num_iterations was 2 and is 1'
    """
    changed = [name for name in now if stored.get(name) != now[name]]
    return "; ".join(f"{name} was {stored.get(name)} and is {now[name]}" for name in changed)


def rollout_file(folder: str, rank: int) -> str:
    """Where a rank keeps its part."""
    return os.path.join(folder, f"rollout_{rank}.pt")


class Rollout(NamedTuple):
    """Where a rank stands between two optimizer steps.

    Attributes:
        step: Micro-batches so far.
        generation: Generation batches so far.
        micro_batches: Of the rollout in use; None if it is used up.
    """

    step: int
    generation: int
    micro_batches: Any


def save_rollout(trainer: SamplingMixin, folder: str, rollout: Rollout) -> None:
    """Store this rank's part of the rollout in use, if it is not used up.

    Args:
        trainer: Whose it is.
        folder: The checkpoint; made where this machine does not have it.
        rollout: Before the first step that a resumed run will take.
    """
    os.makedirs(folder, exist_ok=True)
    state = {
        "step": rollout.step,
        "generation": rollout.generation,
        "rollout": rollout.micro_batches,
        "settings": settings(trainer.objective, trainer.args),
        "marked": True,
    }
    with replacing(Path(rollout_file(folder, trainer.args.process_index))) as temporary:
        torch.save(state, temporary)


def load_rollout(trainer: SamplingMixin, folder: str) -> None:
    """Go on with the stored rollout. All ranks call it together, and all go on or none.

    A rollout that was used up binds nobody: the next one is sampled under the settings of today. One that was not is
    cut and judged as the settings of that day had it, so they must be the same. A checkpoint without any rollout (of
    TRL itself, or of ``save_only_model``) samples a new one.

    Args:
        trainer: Before its first step.
        folder: The checkpoint.

    Raises:
        CapabilityError: On all ranks, if a setting is another one, or a rank's file is missing or cannot be read.
    """
    path, state, trouble = rollout_file(folder, trainer.args.process_index), None, ""
    if os.path.isfile(path) and (damage := trouble_with(Path(path))):
        trouble = f"{path} cannot be read: it {damage}"
    elif os.path.isfile(path):
        try:
            device = (
                trainer.args.device
            )  # that of several ranks on CPUs is "cpu:0", which torch.load does not know
            where = "cpu" if device.type == "cpu" else device
            state = torch.load(path, map_location=where, weights_only=True)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
            trouble = f"{path} cannot be read: {type(error).__name__}: {error}"
    if state is not None and state.get("marked") and not Path(folder, MARKER).is_file():
        trouble = f"{folder} has lost its marker {MARKER!r}, so nobody can tell whether it is whole"
    found = differences(state.get("settings", {}), settings(trainer.objective, trainer.args)) if state else ""
    mine = (
        trouble,
        state is not None,
        state is not None and state["rollout"] is not None,
        found,
        state["generation"] if state else 0,
    )
    everywhere = said_by_ranks(mine)
    _refuse(folder, everywhere)
    if not any(there for _, there, *_ in everywhere):
        return
    trainer._generation = max(generation for *_, generation in everywhere)
    if state is None or state["rollout"] is None:
        trainer._step = 0  # the next micro-batch begins a rollout
    else:
        trainer._step, trainer._buffered_inputs = state["step"], state["rollout"]


def _refuse(folder: str, everywhere: list[tuple[str, bool, bool, str, int]]) -> None:
    ranks = len(everywhere)
    tail = f" Raised on all {ranks} ranks." if ranks > 1 else ""
    for rank, (trouble, *_) in enumerate(everywhere):
        if trouble:
            raise CapabilityError(f"rank {rank}: {trouble}. Restore the file.{tail}")
    if not any(live for _, _, live, *_ in everywhere):
        return
    away = f"delete every {rollout_file(folder, 0).replace('rollout_0', 'rollout_*')} to sample a new one"
    for *_, found, _ in everywhere:
        if found:
            raise CapabilityError(
                f"the checkpoint holds a rollout that is not used up, of a run with other settings: {found}. Resume "
                f"with the old settings until it is, or {away}.{tail}"
            )
    missing = [str(rank) for rank, (_, there, *_) in enumerate(everywhere) if not there]
    if missing:
        raise CapabilityError(
            f"rank {', '.join(missing)} does not find its part of the rollout in {folder}, and others do: some would "
            f"sample and some would not. Restore the file (each machine writes those of its own ranks), or {away}.{tail}"
        )
