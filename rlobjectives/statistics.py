"""Mergeable statistics: what a window knows about all its tokens, whoever holds them.

A `Stat` is one row of float64 numbers with names. Rows of the same kind *fold* into one row, in
any grouping, and the all-zero row changes nothing, so micro-batches, ranks and idle ranks merge
the same way. That is all the distributed code has to know.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rlobjectives.checks import check_shape

__all__ = ["LogSum", "Maximum", "Mean", "Moments", "Stat", "Sum", "fold"]

S = TypeVar("S", bound="Stat")


class Stat(abc.ABC):
    """One mergeable statistic, held as a float64 row of `width` numbers on some device.

    Subclasses say how wide the row is, how rows fold into one, and what they report.
    A metric is the same type: a statistic nobody reads back.

    Args:
        row: Float64 tensor ``[width]``. The all-zero row is the identity of folding.

    Raises:
        ShapeError: If the row has another width.
    """

    width: ClassVar[int]
    __slots__ = ("row",)

    def __init__(self, row: Tensor) -> None:
        check_shape(f"{type(self).__name__}.row", row, (self.width,), "one packed statistic")
        self.row = row.detach().to(torch.float64)

    @classmethod
    @abc.abstractmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Fold ``[k, width]`` rows into one ``[width]`` row, the order given by ``k``."""

    @abc.abstractmethod
    def report(self, name: str) -> dict[str, Tensor]:
        """The numbers a person reads, by metric name. Empty when nothing was measured."""

    @property
    def measured(self) -> Tensor:
        """Whether anything at all was counted (a 0-d bool tensor). True for a plain sum."""
        return torch.ones((), dtype=torch.bool, device=self.row.device)

    @classmethod
    def identity(cls: type[S], device: torch.device | str | None = None) -> S:
        """The statistic of nothing."""
        return cls(torch.zeros(cls.width, dtype=torch.float64, device=device))

    def pack(self) -> Tensor:
        """The row itself, ready to be laid beside others in one message."""
        return self.row

    @classmethod
    def unpack(cls: type[S], row: Tensor) -> S:
        """The inverse of `pack`."""
        return cls(row)

    def merge(self: S, other: S) -> S:
        """The statistic of both populations together."""
        return type(self)(self.fold_rows(torch.stack([self.row, other.row])))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and torch.equal(self.row, other.row)

    __hash__ = None  # type: ignore[assignment]  # rows are tensors: compare them, do not hash them

    def __repr__(self) -> str:
        numbers = ", ".join(f"{number:.6g}" for number in self.row.tolist())
        return f"{type(self).__name__}({numbers})"


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
        return cls(_total(values, mask).reshape(1))

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
        return cls(torch.stack([_total(values, mask), _count(values, mask)]))

    @property
    def value(self) -> Tensor:
        """Numerator over weight; 0 where nothing was counted."""
        total, weight = self.row
        return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), 0.0)

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
        count = _count(values, mask)
        mean = _total(values, mask) / count.clamp_min(1.0)
        deviation = values.detach().to(torch.float64) - mean
        return cls(torch.stack([count, mean, _total(deviation.square(), mask)]))

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
        count = _count(values, mask)
        wide = values.detach().to(torch.float64)
        chosen = wide if mask is None else torch.where(mask, wide, -torch.inf)
        top = chosen.amax() if chosen.numel() else chosen.new_zeros(())
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
        return cls(torch.stack([top.row[0], shift, _total(scaled, mask)]))

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


def fold(kind: type[S], stats: Sequence[S] | Iterable[S], device: torch.device | None = None) -> S:
    """Fold any number of statistics of one kind, none included, in the order given."""
    rows = [stat.row for stat in stats]
    if not rows:
        return kind.identity(device)
    return kind(rows[0]) if len(rows) == 1 else kind(kind.fold_rows(torch.stack(rows)))


def _total(values: Tensor, mask: Tensor | None) -> Tensor:
    # Selecting, never multiplying: inf · 0 is NaN. The sum itself widens to float64 as it goes.
    chosen = values.detach()
    if mask is not None:
        check_shape("mask", mask, tuple(values.shape), "the mask of the values it selects")
        chosen = torch.where(mask, chosen, torch.zeros((), dtype=chosen.dtype, device=chosen.device))
    return chosen.sum(dtype=torch.float64)


def _count(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    return mask.sum(dtype=torch.float64)
