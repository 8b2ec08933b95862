"""A generation batch seen globally: every rank's rewards, groups and masks, and what the estimator makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlobjectives.columns import COLUMNS
from rlobjectives.errors import ShapeError
from rlobjectives.estimators import Estimator
from rlobjectives.layouts import PaddedLayout
from rlobjectives.rollouts import Rollouts

__all__ = ["Scored", "global_rollouts", "merge_rounds", "other_images", "score", "unique_names"]


@dataclass(frozen=True, slots=True)
class Scored:
    """What all ranks agree on about a generation batch.

    Attributes:
        rollouts: All sequences of all ranks, in TRL's global order (so that groups lie together).
        estimate: The estimator's answer for all of them.
        alive: Whether each group carries signal, ``[g]``; None for a token-level estimator.
    """

    rollouts: Rollouts
    estimate: Tensor
    alive: Tensor | None


def unique_names(names: list[str]) -> tuple[str, ...]:
    """Reward names with a number behind those that occur twice (two lambdas, one reward model at two settings).

    Example:
        >>> unique_names(["right", "<lambda>", "<lambda>"])
        ('right', '<lambda>', '<lambda>_1')
    """
    found: list[str] = []
    for name in names:
        other, number = name, 0
        while other in found or (number and other in names):
            number += 1
            other = f"{name}_{number}"
        found.append(other)
    return tuple(found)


def global_rollouts(
    rewards: Tensor,
    names: list[str],
    num_generations: int,
    layout: PaddedLayout,
    accelerator: Any,
    columns: Mapping[str, Tensor] | None = None,
    genuine: int | None = None,
) -> Rollouts:
    """Rollouts of all ranks; every rank builds the same.

    Args:
        rewards: Gathered by TRL, ``[N, r]``, NaN where a function returned None.
        names: Names of the reward functions.
        num_generations: Sequences of a group; groups lie together in the global order, also across ranks.
        layout: This rank's tokens.
        accelerator: Gathers the masks.
        columns: Columns that the estimator reads, of this rank; a user's own among them.
        genuine: Only the first so many rows are data; the rest fill up a last batch.

    Raises:
        NonFiniteError: If a reward is infinite, on all ranks.
    """

    def everywhere(rows: Tensor) -> Tensor:
        return rows if accelerator.num_processes == 1 else _gather_rows(rows, accelerator)

    mask = everywhere(layout.mask.to(torch.uint8)).bool()
    read: dict[str, Any] = {name: everywhere(column)[:genuine] for name, column in (columns or {}).items()}
    if mask.shape[0] != rewards.shape[0] or rewards.shape[0] % num_generations:
        raise ShapeError(
            f"rewards has {rewards.shape[0]} rows, the ranks hold {mask.shape[0]} sequences and a group has "
            f"{num_generations}. TRL's global batch must be whole groups; check rollout_func and the batch sizes."
        )
    rewards, mask = rewards[:genuine], mask[:genuine]
    return Rollouts(
        rewards=rewards,
        scored=~torch.isnan(rewards),
        group_ids=torch.arange(rewards.shape[0], device=rewards.device) // num_generations,
        layout=PaddedLayout(mask.to(rewards.device)),
        reward_names=unique_names(names),
        extra={name: column for name, column in read.items() if name not in COLUMNS},
        **{name: column for name, column in read.items() if name in COLUMNS},
    )


def _gather_rows(rows: Tensor, accelerator: Any) -> Tensor:
    gathered: Tensor = accelerator.gather(accelerator.pad_across_processes(rows, dim=1))
    return gathered


def score(rollouts: Rollouts, estimator: Estimator) -> Scored:
    """Estimate raw advantages of all ranks' sequences. No communication; the same on every rank."""
    estimate = estimator.estimate(rollouts)
    alive = None if estimator.token_level else estimator.carries_signal(rollouts, estimate)
    return Scored(rollouts, estimate, alive)


def other_images(first: dict[str, Any], again: dict[str, Any], columns: list[str]) -> str | None:
    """What to say where two rounds over the same prompts saw other images, or None.

    Images of the prompts are the same in every round. Those that a tool returned belong to one completion, and their
    pixels do not lie in rows of sequences, so they cannot be exchanged with it.

    Args:
        first: A generation batch.
        again: Another round over the same prompts.
        columns: Names of the columns that belong to images.
    """
    for name in columns:
        mine, theirs = first.get(name), again.get(name)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            same = torch.equal(mine, theirs)
        elif isinstance(mine, Tensor) or isinstance(theirs, Tensor):
            same = False
        else:
            same = mine == theirs
        if not same:
            return (
                f"dynamic_sampling = 'resample' would mix the images of two rounds: {name} differs, so a tool returned "
                "some of them. Use 'drop' or 'off'."
            )
    return None


def merge_rounds(
    first: dict[str, Any], again: dict[str, Any], rows: Tensor, pad_token_id: int
) -> dict[str, Any]:
    """Replace rows of a generation batch by those of another round over the same prompts.

    Args:
        first: The batch to keep.
        again: The batch to take rows from.
        rows: Which rows to take, bool ``[B]``.
        pad_token_id: Fills token ids where widths differ.

    Returns:
        The batch, as wide as the wider of the two. Columns that are not one row per sequence stay those of `first`
        (they belong to the prompts).
    """
    merged = dict(first)
    count = rows.shape[0]
    for name, column in first.items():
        other = again.get(name)
        is_rows = isinstance(column, Tensor) and column.dim() >= 1 and column.shape[0] == count
        if not is_rows or not isinstance(other, Tensor) or other.shape[:1] != column.shape[:1]:
            continue
        if column.dim() == 2:
            fill = pad_token_id if name.endswith("_ids") and "type" not in name else 0
            left = name.startswith("prompt_")
            width = max(column.shape[1], other.shape[1])
            column, other = (_widen(one, width, fill, left) for one in (column, other))
        chosen = rows.reshape(-1, *[1] * (column.dim() - 1)).to(column.device)
        merged[name] = torch.where(chosen, other, column)
    return merged


def _widen(rows: Tensor, width: int, fill: int, left: bool) -> Tensor:
    extra = width - rows.shape[1]
    if not extra:
        return rows
    return torch.nn.functional.pad(rows, (extra, 0) if left else (0, extra), value=fill)
