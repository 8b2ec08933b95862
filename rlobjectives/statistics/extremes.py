"""The largest and the smallest entry, and sums of exponentials that must not overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.masking import select
from rlobjectives.statistics.base import Stat, count_of, total_of

__all__ = ["LogSum", "Maximum", "Minimum"]


class Maximum(Stat):
    """The largest counted entry, with the count that tells "nothing" from "zero".

    Example:
        >>> Maximum.of(torch.tensor([-3.0, -2.0])).merge(Maximum.identity()).value
        tensor(-2., dtype=torch.float64)
    """

    width = 2
    __slots__ = ()

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Maximum:
        """Maximum of the counted entries."""
        count = count_of(values, mask)
        chosen = _floating(values)
        chosen = chosen if mask is None else select(chosen, mask, -torch.inf)
        top = chosen.amax().to(torch.float64) if chosen.numel() else torch.zeros_like(count)
        return cls(torch.stack([count, torch.where(count > 0, top, 0.0)]))

    @property
    def value(self) -> Tensor:
        """The maximum; 0 when nothing was counted."""
        return self.row[1]

    @property
    def measured(self) -> Tensor:
        """Whether anything was counted."""
        return self.row[0] > 0

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Take the maximum over the rows that counted something."""
        count, value = rows.unbind(-1)
        top = torch.where(count > 0, value, -torch.inf).amax()
        return torch.stack([count.sum(), torch.where(count.sum() > 0, top, 0.0)])

    def report(self, name: str) -> dict[str, Tensor]:
        """The maximum under ``name``."""
        return {name: self.value}


class Minimum(Maximum):
    """The smallest counted entry: a `Maximum` of the negatives, reported with its sign.

    Example:
        >>> Minimum.of(torch.tensor([3.0, -2.0])).report("lowest")
        {'lowest': tensor(-2., dtype=torch.float64)}
    """

    __slots__ = ()

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Minimum:
        """Minimum of the counted entries."""
        return cls(Maximum.of(-_floating(values), mask).row)

    @property
    def value(self) -> Tensor:
        """The minimum; 0 when nothing was counted."""
        return -self.row[1]


class LogSum(Stat):
    """``Σ exp(x)`` kept as a shift and a scaled sum, so that no exponent overflows or vanishes.

    Example:
        >>> LogSum.of(torch.tensor([1000.0])).merge(LogSum.of(torch.tensor([1000.0]))).log
        tensor(1000.6931, dtype=torch.float64)
    """

    width = 3
    __slots__ = ()

    @classmethod
    def of(cls, exponents: Tensor, mask: Tensor | None = None) -> LogSum:
        """Sum of ``exp`` over the counted entries."""
        top = Maximum.of(exponents, mask)
        # Terms that are all exactly zero have the exponent −∞, from which nothing can be subtracted.
        shift = torch.where(torch.isneginf(top.value), 0.0, top.value)
        scaled = (exponents.detach().to(torch.float64) - shift).exp()
        return cls(torch.stack([top.row[0], shift, total_of(scaled, mask)]))

    @property
    def count(self) -> Tensor:
        """How many entries were counted."""
        return self.row[0]

    @property
    def log(self) -> Tensor:
        """``log Σ exp(x)``; minus infinity when nothing was counted."""
        return torch.where(self.row[0] > 0, self.row[1] + self.row[2].log(), -torch.inf)

    @property
    def measured(self) -> Tensor:
        """Whether anything was counted."""
        return self.row[0] > 0

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Bring every row to the largest shift and add."""
        count, shift, scaled = rows.unbind(-1)
        # A sum of zero has no scale of its own; a NaN keeps its place.
        live = (count > 0) & (scaled != 0)
        top = torch.where(live, shift, -torch.inf).amax()
        top = torch.where(live.any(), top, 0.0)
        moved = torch.where(live, scaled * (shift - top).clamp_max(0.0).exp(), 0.0)
        return torch.stack([count.sum(), top, moved.sum()])

    def report(self, name: str) -> dict[str, Tensor]:
        """The logarithm under ``name``."""
        return {name: self.log}


def _floating(values: Tensor) -> Tensor:
    # Integers have no infinity, and float32 does not hold all of them.
    return values.detach() if values.is_floating_point() else values.detach().to(torch.float64)
