"""Sums, means and variances."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.masking import select
from rlobjectives.statistics.base import Stat, count_of, total_of

__all__ = ["Mean", "Moments", "Sum"]


class Sum(Stat):
    """A total. Reported as it is.

    Example:
        >>> Sum.of(torch.tensor([1.0, 2.0])).merge(Sum.of(torch.tensor([4.0]))).value
        tensor(7., dtype=torch.float64)
    """

    width = 1
    __slots__ = ()

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Sum:
        """Sum of the counted entries of ``values``."""
        return cls(total_of(values, mask).reshape(1))

    @property
    def value(self) -> Tensor:
        """The total, 0-d float64."""
        return self.row[0]

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Add the rows."""
        return rows.sum(0)

    def report(self, name: str) -> dict[str, Tensor]:
        """The total under ``name``."""
        return {name: self.value}


class Mean(Stat):
    """A weighted mean, kept as its numerator and its weight.

    Example:
        >>> one = Mean.of(torch.tensor([1.0, 9.0]), torch.tensor([True, False]))
        >>> one.merge(Mean.of(torch.tensor([2.0, 3.0]))).value
        tensor(2., dtype=torch.float64)
    """

    width = 2
    __slots__ = ()

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Mean:
        """Plain mean of the counted entries."""
        return cls(torch.stack([total_of(values, mask), count_of(values, mask)]))

    @property
    def value(self) -> Tensor:
        """Numerator over weight; 0 where nothing was counted."""
        total, weight = self.row
        return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), 0.0)

    @property
    def weight(self) -> Tensor:
        """The weight it is a mean over."""
        return self.row[1]

    @property
    def measured(self) -> Tensor:
        """Whether the weight is positive."""
        return self.row[1] > 0

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Add numerators and weights."""
        return rows.sum(0)

    def report(self, name: str) -> dict[str, Tensor]:
        """The mean under ``name``."""
        return {name: self.value}


class Moments(Stat):
    """Count, mean and centred second moment: exact mean and variance over any partition.

    Two passes in float64 locally, and folding never subtracts two large sums, so rewards of
    1e4 ± 1e-3 keep their variance.

    Example:
        >>> left, right = Moments.of(torch.tensor([1.0, 2.0])), Moments.of(torch.tensor([3.0]))
        >>> left.merge(right).std(ddof=1)
        tensor(1., dtype=torch.float64)
    """

    width = 3
    __slots__ = ()

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Moments of the counted entries of ``values``."""
        count = count_of(values, mask)
        mean = total_of(values, mask) / count.clamp_min(1.0)
        deviation = values.detach().to(torch.float64) - mean
        if mask is not None:
            deviation = select(deviation, mask)
        deviation = deviation.reshape(-1)  # no view: the values may be a transposed matrix
        return cls(torch.stack([count, mean, torch.linalg.vecdot(deviation, deviation)]))

    @property
    def count(self) -> Tensor:
        """How many entries were counted."""
        return self.row[0]

    @property
    def mean(self) -> Tensor:
        """Their mean; 0 when there are none."""
        return self.row[1]

    def variance(self, ddof: int) -> Tensor:
        """Centred second moment over ``count - ddof``; 0 where that is not positive."""
        freedom = self.row[0] - ddof
        return torch.where(freedom > 0, self.row[2] / freedom.clamp_min(1.0), 0.0)

    def std(self, ddof: int) -> Tensor:
        """Square root of `variance`."""
        return self.variance(ddof).sqrt()

    @property
    def weight(self) -> Tensor:
        """How many entries were counted."""
        return self.row[0]

    @property
    def measured(self) -> Tensor:
        """Whether anything was counted."""
        return self.row[0] > 0

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Combine means by count and move every second moment to the common mean."""
        count, mean, m2 = rows.unbind(-1)
        total = count.sum()
        pooled = (count * mean).sum() / total.clamp_min(1.0)
        shift = torch.where(count > 0, mean - pooled, 0.0)
        return torch.stack([total, pooled, m2.sum() + (count * shift.square()).sum()])

    def report(self, name: str) -> dict[str, Tensor]:
        """``name`` + ``mean`` and ``name`` + ``std`` (ddof 1); ``name`` ends in ``/`` or ``_``."""
        return {f"{name}mean": self.mean, f"{name}std": self.std(ddof=1)}
