"""The bound that a budget on the second moment of log-ratios sets, found exactly from histograms.

The values ``v = d²`` are never sorted or gathered. A float32 number's bits, read as an integer, order
non-negative numbers; three histograms, one inside the other, walk down those bits to the one value at which
the budget runs out, and carry the count and the sum of everything below. Histograms merge, so any cut of the
window gives the same answer; it is exact for float32 log-ratios, and within 1e-7 for float64 ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlobjectives.masking import select
from rlobjectives.statistics.distributions import BINS, Histogram

__all__ = ["ROUNDS", "Level", "level_of", "local_level", "round_histogram"]

ROUNDS = 3
"""Histograms it takes: 11, 10 and 10 bits of the 31 that a non-negative float32 has."""

_SHIFTS = (20, 10, 0)
_FINE_MASK = 1023
_RELEASED_MARGIN = 1e-12


class Level(NamedTuple):
    """Where the budget runs out. All fields are 0-d float64 (`binding` bool), on the device.

    Attributes:
        size: Values in all, n.
        total: Their sum.
        binding: Whether there is such a place; otherwise nothing has to be bounded.
        value: The value at which the budget runs out, v_k.
        below: Values smaller than that, k.
        below_total: Their sum.
        previous: The largest of them, v_{k−1}; 0 when there is none.
    """

    size: Tensor
    total: Tensor
    binding: Tensor
    value: Tensor
    below: Tensor
    below_total: Tensor
    previous: Tensor

    def water_level(self, budget: float) -> Tensor:
        """The τ² that solves ``Σ min(v, τ²) = n·budget``; infinite where nothing has to be bounded."""
        above = (self.size - self.below).clamp_min(1.0)
        exact = (self.size * budget - self.below_total) / above
        exact = torch.minimum(exact.clamp_min(0.0), self.value)
        return torch.where(self.binding, exact, torch.inf)

    def released_level(self) -> Tensor:
        """The largest value below the one at which the budget runs out, minus 1e-12; 0 when there is none."""
        return torch.where(self.binding, (self.previous - _RELEASED_MARGIN).clamp_min(0.0), torch.inf)

    def cutoff(self) -> Tensor:
        """Values up to this one stay when values are dropped from the top; the smallest always stay.

        It lies half-way between the largest that stays and the smallest that goes, so that the rounding of a
        second forward changes neither's fate.
        """
        half_way = torch.where(self.below > 0, (self.previous + self.value) / 2.0, self.value * 1.000_001)
        return torch.where(self.binding, half_way, torch.inf)

    def mean(self) -> Tensor:
        """Mean of all values; 0 when there are none."""
        return self.total / self.size.clamp_min(1.0)

    def mean_below(self, level: Tensor) -> Tensor:
        """Mean of ``min(v, level)`` for a level between `previous` and `value`."""
        bounded = torch.where(self.binding, level, 0.0)
        filled = (self.below_total + bounded * (self.size - self.below)) / self.size.clamp_min(1.0)
        return torch.where(self.binding, filled, self.mean())


class _Block(NamedTuple):
    # One step of the walk: the bits fixed so far, and what lies below them.
    prefix: Tensor
    below: Tensor
    below_total: Tensor
    previous: Tensor
    value: Tensor
    binding: Tensor


def round_histogram(
    log_ratio: Tensor, mask: Tensor, earlier: Sequence[Histogram], *, budget: float, drop: bool
) -> Histogram:
    """Histogram of the squares in the block that the earlier rounds point to.

    Args:
        log_ratio: d, any shape.
        mask: Which of them count.
        earlier: Merged histograms of the rounds before.
        budget: Bound on the mean square.
        drop: See `level_of`.

    Returns:
        The histogram of round ``len(earlier)``, of this micro-batch.
    """
    turn = len(earlier)
    distance = select(log_ratio.detach(), mask).abs()
    keys = distance.to(torch.float32).view(torch.int32)
    inside = mask
    if turn:
        prefix = _walk(earlier, budget, drop).prefix
        inside = mask & ((keys >> _SHIFTS[turn - 1]) == prefix)
    bins = keys >> _SHIFTS[turn]
    return Histogram.of(bins & _FINE_MASK if turn else bins, distance.to(torch.float64).square(), inside)


def level_of(rounds: Sequence[Histogram], *, budget: float, drop: bool) -> Level:
    """Where the budget runs out, from the merged histograms of all rounds.

    Args:
        rounds: `ROUNDS` histograms.
        budget: Bound on the mean square, > 0.
        drop: False bounds values: the place is the first value v with ``Σ min(v', v) > n·budget``. True drops
            values from the top: the first value at which the mean of it and all smaller ones is no longer
            below budget.
    """
    end = _walk(rounds, budget, drop)
    count, total = rounds[0].counts.sum(), rounds[0].sums.sum()
    return Level(count, total, end.binding, end.value, end.below, end.below_total, end.previous)


def local_level(log_ratio: Tensor, mask: Tensor, *, budget: float, drop: bool) -> Level:
    """Where the budget runs out for these tokens alone.

    Example:
        >>> d = torch.tensor([0.5, 0.1, -0.3, -0.05, -0.6])
        >>> local_level(d, torch.ones(5, dtype=torch.bool), budget=0.04, drop=False).water_level(0.04).sqrt()
        tensor(0.2500, dtype=torch.float64)
    """
    rounds: list[Histogram] = []
    for _ in range(ROUNDS):
        rounds.append(round_histogram(log_ratio, mask, rounds, budget=budget, drop=drop))
    return level_of(rounds, budget=budget, drop=drop)


def _walk(rounds: Sequence[Histogram], budget: float, drop: bool) -> _Block:
    zero = rounds[0].row.new_zeros(())
    count = rounds[0].counts.sum()
    block = _Block(zero.to(torch.int32), zero, zero, zero, zero, zero > 1)
    for turn, found in enumerate(rounds):
        block = _descend(found, block, turn, count, budget, drop)
    return block


def _descend(found: Histogram, block: _Block, turn: int, count: Tensor, budget: float, drop: bool) -> _Block:
    counts, sums, peaks = found.counts, found.sums, found.peaks
    below = block.below + counts.cumsum(0)
    below_total = block.below_total + sums.cumsum(0)
    filled = below_total + peaks * (count - below)
    over = (below_total >= budget * below) if drop else (filled > budget * count)
    over = over & (counts > 0)
    order = torch.arange(BINS, device=counts.device)
    first = torch.where(over, order, BINS).amin()
    # In a finer round some bin must cross, since its block did; only rounding at a tie can say otherwise.
    last = torch.where(counts > 0, order, 0).amax()
    chosen = torch.where(first < BINS, first, last)
    before = order < chosen
    prefix = chosen.to(torch.int32)
    return _Block(
        prefix=prefix if turn == 0 else (block.prefix << 10) | prefix,
        below=block.below + torch.where(before, counts, 0.0).sum(),
        below_total=block.below_total + torch.where(before, sums, 0.0).sum(),
        previous=torch.maximum(block.previous, torch.where(before, peaks, 0.0).amax()),
        value=peaks.index_select(0, chosen.reshape(1)).squeeze(0),
        binding=first < BINS if turn == 0 else block.binding,
    )
