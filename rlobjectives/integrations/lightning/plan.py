"""How a rollout is cut: epochs × windows × micro-batches, as positions of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.host import TrainedModule

__all__ = ["Plan", "Turn", "plan_updates", "window_facts"]

Plan = list[list[list[int]]]
"""For each update of a rollout, its micro-batches; each micro-batch lists positions of sequences."""
Turn = tuple[str, list[list[int]]]
"""One update of a rollout: who takes it, as the round calls it, and its micro-batches."""


def window_facts(module: TrainedModule, datamodule: object | None) -> dict[str, Any]:
    """What the data module, the module and the trainer together say of the smallest optimizer step.

    Args:
        module: Says into how many windows a rollout is cut; attached to a trainer, how many ranks there are.
        datamodule: Its ``prompts_per_step`` and ``num_generations`` are read if it has them.

    Returns:
        ``window_sequences``, over all ranks, and ``window_settings`` of `TrainerFacts`; nothing where one is unknown.
    """
    prompts, repeats = (getattr(datamodule, name, None) for name in ("prompts_per_step", "num_generations"))
    if prompts is None or repeats is None or getattr(module, "_trainer", None) is None:
        return {}
    ranks = int(module.trainer.world_size)
    # Every rank cuts its own prompts alike; a window without any is skipped.
    groups = max(1, prompts // ranks // module.windows_per_rollout) * ranks
    settings = "prompts_per_step and num_generations of the data, windows_per_rollout of the module"
    return {"window_sequences": groups * repeats, "window_settings": settings}


def plan_updates(
    group_ids: Sequence[int],
    *,
    windows: int,
    epochs: int,
    micro_batch_size: int,
    generator: torch.Generator | None = None,
) -> Plan:
    """Cut one rank's share of a rollout into updates and micro-batches.

    A window takes whole prompt groups, so that a group's centred advantages stay together; windows hold the same
    number of groups up to one. The number of updates depends on the configuration alone, so every rank plans the
    same number; a rank with few groups gets windows without micro-batches.

    Args:
        group_ids: Prompt group of each sequence, ``n`` of them, in any order.
        windows: Optimizer windows in one pass over the rollout.
        epochs: Passes over the rollout.
        micro_batch_size: Most sequences in a micro-batch.
        generator: Shuffles groups and sequences anew in each epoch when there are several. None keeps the order.

    Returns:
        ``epochs × windows`` updates.

    Example:
        >>> plan_updates([7, 8, 7, 8], windows=2, epochs=1, micro_batch_size=2)
        [[[0, 2]], [[1, 3]]]
    """
    members: dict[int, list[int]] = {}
    for position, group in enumerate(group_ids):
        members.setdefault(group, []).append(position)
    groups = list(members.values())
    plan: Plan = []
    for _ in range(epochs):
        if epochs > 1 and generator is not None:
            groups = [groups[k] for k in torch.randperm(len(groups), generator=generator).tolist()]
        for window in range(windows):
            first, last = (len(groups) * bound // windows for bound in (window, window + 1))
            rows = [position for group in groups[first:last] for position in group]
            if epochs > 1 and generator is not None:
                rows = [rows[k] for k in torch.randperm(len(rows), generator=generator).tolist()]
            plan.append([rows[k : k + micro_batch_size] for k in range(0, len(rows), micro_batch_size)])
    return plan
