"""What a statistic is, how any number of them fold, and how entries are counted."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rlobjectives.checks import check_shape
from rlobjectives.masking import count, select

__all__ = ["Stat", "count_of", "fold", "measured_values", "total_of"]

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

    @property
    def weight(self) -> Tensor:
        """How much its numbers weigh beside those of another window (0-d float64); NaN where that has no meaning."""
        return torch.full((), torch.nan, dtype=torch.float64, device=self.row.device)

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


def fold(kind: type[S], stats: Sequence[S] | Iterable[S], device: torch.device | None = None) -> S:
    """Fold any number of statistics of one kind, none included, in the order given."""
    found = list(stats)
    if not found:
        return kind.identity(device)
    return found[0] if len(found) == 1 else kind(kind.fold_rows(torch.stack([stat.row for stat in found])))


def measured_values(statistics: Mapping[str, Stat]) -> dict[str, float]:
    """The numbers behind statistics, as plain ones; one over nothing is left out. Looks at the device.

    Args:
        statistics: By name.

    Returns:
        What each reports, by metric name.

    Example:
        >>> from rlobjectives import Maximum, Mean
        >>> measured_values({"size": Mean.of(torch.tensor([1.0, 2.0])), "none": Maximum.identity()})
        {'size': 1.5}
    """
    numbers: dict[str, float] = {}
    for name, stat in statistics.items():
        if bool(stat.measured):
            numbers.update({label: float(number) for label, number in stat.report(name).items()})
    return numbers


def total_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of the counted entries, 0-d float64, without gradient; of booleans, how many are true."""
    chosen = values.detach()
    if mask is not None:
        check_shape("mask", mask, tuple(values.shape), "the mask of the values it selects")
    if chosen.dtype is torch.bool:
        return count(chosen if mask is None else chosen & mask).to(torch.float64)
    return (chosen if mask is None else select(chosen, mask)).sum(dtype=torch.float64)


def count_of(values: Tensor, mask: Tensor | None) -> Tensor:
    """How many entries are counted, 0-d float64."""
    if mask is None:
        return torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    check_shape("mask", mask, tuple(values.shape), "the mask of the values it selects")
    return count(mask).to(torch.float64)
