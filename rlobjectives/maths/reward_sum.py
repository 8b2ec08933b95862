"""A sequence's combined reward, and how far rounding may have moved it.

Rewards arrive rounded to the precision they were given in, so sums that were meant to be equal are not: 0.7 + 0.3 and
0.1 + 0.9 differ in float32. Whether rewards are "the same" is judged here alone, for estimators, filters and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.errors import CapabilityError
from rlobjectives.maths.groups import group_extremes, group_largest
from rlobjectives.rollouts import Groups, Rollouts

__all__ = [
    "DOUBLE_UNIT",
    "RewardSum",
    "combined_greedy",
    "combined_reward",
    "rounding_unit",
    "weighted_columns",
    "weights_in_order",
]

DOUBLE_UNIT = 2.0**-53
"""Largest relative error of one rounding in float64."""


def rounding_unit(dtype: torch.dtype) -> float:
    """Largest error of a number that was rounded to ``dtype``, relative to what came out; 0 for integers.

    Example:
        >>> rounding_unit(torch.bfloat16) == 2.0**-7 / (2.0 - 2.0**-7), rounding_unit(torch.int64)
        (True, 0.0)
    """
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps / (2.0 - eps)


@dataclass(frozen=True, slots=True)
class RewardSum:
    """The weighted sum of each sequence's rewards, and what it was added up from.

    Attributes:
        total: ``Σₖ wₖ·rₖ``, float64 ``[n, 1]``; a missing reward adds nothing.
        scored: Whether any reward of the sequence is scored, bool ``[n, 1]``.
        parts: What was added up, ``[n, k]``; None where a single column counts, so that nothing was.
        known: Which of the parts are scored, bool ``[n, k]``; None with them.
        unit: Relative error of each reward as it arrived (`rounding_unit`).
        smallest: Size below which that error no longer shrinks with the number, times the weights.
        arithmetic: Relative error of the products and sums, and of the weights.
        groups: The prompt groups.
    """

    total: Tensor
    scored: Tensor
    parts: Tensor | None
    known: Tensor | None
    unit: float
    smallest: float
    arithmetic: float
    groups: Groups

    @property
    def size(self) -> Tensor:
        """``Σₖ |wₖ·rₖ|``, ``[n, 1]``."""
        return self.total.abs() if self.parts is None else self.parts.abs().sum(1, keepdim=True)

    @property
    def rounding(self) -> Tensor:
        """How far each sum may be from what was meant, ``[n, 1]``; 0 where a single reward is scored.

        Two sums of a window that differ by at most twice the largest of it are the same reward.
        """
        if self.parts is None or self.known is None:
            return torch.zeros_like(self.total)
        error = self.unit * (self.size + self.smallest) + self.arithmetic * self.size
        return torch.where(self.known.sum(1, keepdim=True) > 1, error, 0.0)

    def tolerance(self) -> Tensor | None:
        """Largest difference within each group that rounding explains, ``[g, 1]``; None where it explains none.

        Columns that are equal in all members of the group are rounded alike in all of them. So a group in which at
        most one column differs is judged exactly.
        """
        if self.parts is None:
            return None
        low, high = group_extremes(self.parts, self.scored.expand_as(self.parts), self.groups)
        differs = high > low
        sizes = self.parts.abs()
        moving = torch.where(differs[self.groups.index], sizes, 0.0).sum(1, keepdim=True)
        bound = self.unit * (moving + self.smallest) + self.arithmetic * sizes.sum(1, keepdim=True)
        largest = group_largest(bound, self.scored, self.groups)
        return torch.where(differs.sum(1, keepdim=True) > 1, 2.0 * largest, 0.0)

    def exceeds(self, threshold: float) -> Tensor:
        """Whether each sum is greater than a number by more than rounding explains, bool ``[n, 1]``."""
        return self.total - threshold > self._error + DOUBLE_UNIT * abs(threshold)

    def nonzero(self) -> Tensor:
        """Whether each sum is something else than 0, rounding aside; bool ``[n, 1]``."""
        return self.total.abs() > self._error

    @property
    def _error(self) -> Tensor:
        # A reward that counts alone is taken as it arrived.
        return (self.unit * (self.parts is not None) + self.arithmetic) * self.size


def combined_reward(rollouts: Rollouts, weights: Sequence[float] | None) -> RewardSum:
    """The weighted sum of a sequence's rewards.

    Missing cells add nothing. A sequence none of whose rewards is scored has no reward at all,
    which is not a reward of zero.

    Args:
        rollouts: Rewards ``[n, r]`` and their `scored` mask.
        weights: One weight per reward; None is 1 for each.

    Raises:
        CapabilityError: If there is not one weight per reward.

    Example:
        >>> rewards = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
        >>> found = combined_reward(Rollouts(rewards=rewards, group_ids=torch.tensor([0, 0])), None)
        >>> bool(found.total[0] == found.total[1]), bool((found.total[0] - found.total[1]).abs() <= found.tolerance())
        (False, True)
    """
    return _summed(rollouts, rollouts.rewards, weights)


def combined_greedy(rollouts: Rollouts, weights: Sequence[float] | None, reader: str) -> RewardSum:
    """The same of the greedy answers to each sequence's prompt, which ``reader`` needs."""
    return _summed(rollouts, rollouts.need("greedy_rewards", reader), weights)


def _summed(rollouts: Rollouts, rewards: Tensor, weights: Sequence[float] | None) -> RewardSum:
    scored, count = rollouts.scored, rewards.shape[1]
    assert scored is not None and rollouts.reward_dtype is not None
    if weights is not None and len(weights) != count:
        raise CapabilityError(
            f"there are {len(weights)} weights for {count} rewards {rollouts.reward_names}. "
            "Give one weight per reward."
        )
    given = (1.0,) * count if weights is None else tuple(weights)
    counted = [column for column, weight in enumerate(given) if weight != 0.0]
    total = rewards.sum(1) if weights is None else weighted_columns(rewards, weights)
    kept = scored if len(counted) == count else scored[:, counted]
    several, dtype = len(counted) > 1, rollouts.reward_dtype
    steps = len(counted) + 2 if several else 2 * (given[counted[0]] != 1.0 if counted else 0)
    tiny = torch.finfo(dtype).tiny if dtype.is_floating_point else 0.0
    return RewardSum(
        total=total.unsqueeze(1),
        scored=scored.any(1, keepdim=True),
        parts=torch.stack([given[column] * rewards[:, column] for column in counted], dim=1)
        if several
        else None,
        known=kept if several else None,
        unit=rounding_unit(dtype),
        smallest=tiny * sum(abs(weight) for weight in given),
        arithmetic=steps * DOUBLE_UNIT,
        groups=rollouts.groups,
    )


def weights_in_order(
    owner: str, weights: Sequence[float] | Mapping[str, float] | None, names: tuple[str, ...]
) -> tuple[float, ...] | None:
    """Weights by column, however they were given.

    Args:
        owner: Who weighs, for messages.
        weights: In column order, by name, or None for 1 each.
        names: Of the rewards, in column order.

    Raises:
        CapabilityError: If there is not exactly one weight for each named reward.
    """
    if weights is None:
        return None
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise CapabilityError(
                f"{owner} has weights for {sorted(weights)}; the rewards are {sorted(names)}. "
                "Give exactly one weight per reward, by its name."
            )
        return tuple(weights[name] for name in names)
    if len(weights) != len(names):
        raise CapabilityError(
            f"{owner} has {len(weights)} weights for {len(names)} rewards {names}. Give one weight per reward."
        )
    return tuple(weights)


def weighted_columns(values: Tensor, weights: Sequence[float]) -> Tensor:
    """``Σₖ wₖ·vᵢₖ`` of a handful of columns; the weights stay numbers, so nothing is copied to the device."""
    total = values.new_zeros(values.shape[0])
    for column, weight in zip(values.unbind(1), weights, strict=True):
        total = total + weight * column
    return total
