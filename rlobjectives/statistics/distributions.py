"""Mergeable statistics of a whole distribution: an effective sample size, and a histogram."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.checks import check_shape
from rlobjectives.statistics import Maximum, Stat

__all__ = ["BINS", "EffectiveSize", "Histogram"]

BINS = 2048
"""Bins of a `Histogram`: three of them, one inside the other, tell all float32 numbers apart."""

_LARGEST_EXPONENT = 700.0


class EffectiveSize(Stat):
    """``N``, ``Σw`` and ``Σw²`` of importance weights, kept relative to the largest weight.

    What is kept is ``[N, m, Σe^{l−m}, Σe^{2(l−m)}]`` with ``m = max l`` and ``w = e^l``, so that neither the
    scale of the weights nor an overflowing one changes the normalised effective sample size ``(Σw)² /
    (N·Σw²)``.

    Example:
        >>> EffectiveSize.of(torch.tensor([500.0, 0.0])).value()
        tensor(0.5000, dtype=torch.float64)
        >>> EffectiveSize.of(torch.full((3,), -11.5)).value()
        tensor(1., dtype=torch.float64)
    """

    width = 4
    __slots__ = ()

    @classmethod
    def of(cls, log_weights: Tensor, mask: Tensor | None = None) -> EffectiveSize:
        """Statistic of the counted entries' log-weights."""
        count, top = Maximum.of(log_weights, mask).row
        gap = log_weights.detach().to(torch.float64) - top
        gap = gap if mask is None else torch.where(mask, gap, -torch.inf)
        return cls(torch.stack([count, top, gap.exp().sum(), (2.0 * gap).exp().sum()]))

    @property
    def count(self) -> Tensor:
        """How many weights were counted."""
        return self.row[0]

    @property
    def measured(self) -> Tensor:
        """Whether any weight was counted."""
        return self.row[0] > 0

    def value(self, epsilon: float = 0.0) -> Tensor:
        """Normalised effective sample size in [1/N, 1], 0-d float64; 1 when nothing was counted.

        Args:
            epsilon: Added to ``Σw²``, in squared weights. Makes the result depend on the weights' scale.
        """
        count, shift, first, second = self.row
        return effective_size(count, shift, first, second, epsilon)

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Bring every row to the largest shift and add."""
        count, shift, first, second = rows.unbind(-1)
        counted = count > 0
        top = torch.where(counted, shift, -torch.inf).amax()
        top = torch.where(counted.any(), top, 0.0)
        gap = torch.where(counted, shift - top, -torch.inf)
        return torch.stack([count.sum(), top, (first * gap.exp()).sum(), (second * (2.0 * gap).exp()).sum()])

    def report(self, name: str) -> dict[str, Tensor]:
        """The normalised effective sample size under ``name``."""
        return {name: self.value()}


def effective_size(
    count: Tensor, shift: Tensor, first: Tensor, second: Tensor, epsilon: float = 0.0
) -> Tensor:
    """``(Σw)² / (N·(Σw² + ε))`` from sums of weights divided by ``e^shift``; 1 where N is 0.

    Args:
        count: N, any shape.
        shift: Logarithm of the unit the sums are in.
        first: ``Σ w/e^shift``.
        second: ``Σ (w/e^shift)²``.
        epsilon: In squared weights.

    Returns:
        In [0, 1], float64, the shape of ``count``.

    Example:
        >>> one = torch.ones((), dtype=torch.float64)
        >>> effective_size(4 * one, 0 * one, 7.5 * one, 21.25 * one)
        tensor(0.6618, dtype=torch.float64)
    """
    if epsilon:
        exponent = (-2.0 * shift).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        second = second + epsilon * exponent.exp()
    counted = count > 0
    size = first.square() / torch.where(counted, count * second, 1.0)
    return torch.where(counted, size.clamp(0.0, 1.0), 1.0)


class Histogram(Stat):
    """Counts, sums and peaks of non-negative values in `BINS` bins.

    Example:
        >>> found = Histogram.of(torch.tensor([0, 3, 3]), torch.tensor([0.5, 2.0, 4.0]))
        >>> found.counts[3], found.sums[3], found.peaks[3]
        (tensor(2., dtype=torch.float64), tensor(6., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """

    width: ClassVar[int] = 3 * BINS
    __slots__ = ()

    @classmethod
    def of(cls, bins: Tensor, values: Tensor, mask: Tensor | None = None) -> Histogram:
        """Statistic of the counted values.

        Args:
            bins: Integer bin of each value, in ``[0, BINS)``.
            values: Non-negative, the same shape.
            mask: Which of them count.
        """
        check_shape("values", values, tuple(bins.shape), "one value a bin number")
        wide = values.detach().to(torch.float64)  # before anything else: integers would pass through float32
        if mask is not None:  # what does not count goes to a bin that is cut off below
            check_shape("mask", mask, tuple(bins.shape), "the mask of the values it selects")
            bins = torch.where(mask, bins, BINS)
            wide = torch.where(mask, wide, 0.0)
        index, wide = bins.reshape(-1).long(), wide.reshape(-1)
        empty = wide.new_zeros(BINS + 1)
        counts = empty.index_add(0, index, torch.ones_like(wide))
        sums = empty.index_add(0, index, wide)
        peaks = empty.scatter_reduce(0, index, wide, "amax")
        return cls(torch.cat([counts[:BINS], sums[:BINS], peaks[:BINS]]))

    @property
    def counts(self) -> Tensor:
        """Values in each bin, ``[BINS]``."""
        return self.row[:BINS]

    @property
    def sums(self) -> Tensor:
        """Their sum, ``[BINS]``."""
        return self.row[BINS : 2 * BINS]

    @property
    def peaks(self) -> Tensor:
        """The largest of them, ``[BINS]``; 0 in an empty bin."""
        return self.row[2 * BINS :]

    @property
    def measured(self) -> Tensor:
        """Whether anything was counted."""
        return self.counts.sum() > 0

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Add counts and sums, keep the higher peak."""
        return torch.cat([rows[:, : 2 * BINS].sum(0), rows[:, 2 * BINS :].amax(0)])

    def report(self, name: str) -> dict[str, Tensor]:
        """Count and mean; a histogram is for other code to read."""
        total = self.counts.sum()
        return {f"{name}count": total, f"{name}mean": self.sums.sum() / total.clamp_min(1.0)}
