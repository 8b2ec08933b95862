"""What every part has in common: capabilities, window statistics, metrics; and the context it reads."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.columns import Column, Read, read
from rlobjectives.errors import WindowError
from rlobjectives.options import check_fields, resolve_annotations
from rlobjectives.statistics import Stat

__all__ = ["Component", "Metric", "WindowContext"]

_Kind = TypeVar("_Kind", bound=Stat)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric a part may report.

    Attributes:
        kind: The statistic it is; says how it merges over micro-batches and ranks.
        unit: Unit of the number.
        meaning: One line for the table in the docs.
    """

    kind: type[Stat]
    unit: str
    meaning: str


class Component(abc.ABC):
    """Base of estimators, losses, reductions and what rides along.

    A part is a frozen dataclass with keyword-only options. Each is checked against its type and bounds
    (`rlobjectives.option`) when a part is made, then `check` looks at them together. What it declares here is static, so that
    every rank lays its statistics out the same way even when it holds no data.
    """

    def __post_init__(self, *_: object) -> None:
        """Where a dataclass checks its options: each by itself, then together."""
        if dataclasses.is_dataclass(self):
            check_fields(self)
        self.check()

    def check(self) -> None:  # noqa: B027  # most parts have nothing to add
        """Raise where options contradict each other; each has been checked against its type and bounds."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        resolve_annotations(cls)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: Component, *given: object) -> None:  # an ``InitVar`` each
                Component.__post_init__(self)
                own(self, *given)

            cls.__post_init__ = checked  # type: ignore[method-assign]  # the same check, after the common one

    capabilities: ClassVar[Capabilities] = Capabilities()
    reads: ClassVar[Sequence[str | Column | Read]] = ()
    """Columns it reads: the library's by name, its own as `Column`, either with `read` where it is not required."""
    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {}
    metrics: ClassVar[Mapping[str, Metric]] = {}
    examples: ClassVar[Sequence[Mapping[str, object]]] = ()
    """Options worth trying, beside the defaults and every choice of a flag or a `Literal`: what laws run on as well."""
    may_differ: ClassVar[frozenset[str]] = frozenset()
    """Attributes of a part that may have another value on each rank, such as a cache; all others are compared."""

    def declared_reads(self) -> tuple[Read, ...]:
        """The columns that this very instance reads; the class's, unless options change them."""
        return tuple(map(read, self.reads))

    def required(self) -> Capabilities:
        """The capabilities of this very instance: the class's and the columns it reads, unless options change them."""
        names = frozenset(one.column.name for one in self.declared_reads() if one.required)
        return self.capabilities.merge(Capabilities(reads=names))

    def declared_statistics(self) -> Mapping[str, type[Stat]]:
        """The window statistics of this very instance; the class's, unless options change them."""
        return self.window_statistics

    def declared_metrics(self) -> Mapping[str, Metric]:
        """The metrics of this very instance; the class's, unless options change them."""
        return self.metrics

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Contradictions with the other parts of an objective and with the trainer, one sentence each.

        Args:
            parts: All parts, by field.
            facts: What the trainer says of itself; it says nothing yet where an objective is made.
        """
        del parts, facts
        return ()


def _identity(per_sequence: Tensor) -> Tensor:
    return per_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowContext:
    """What a part may know about the whole window: all micro-batches of one step, on all ranks.

    Everything stays on the device as 0-d float64; reading it into Python would be a host sync.

    Attributes:
        tokens: Counted tokens.
        sequences: Counted sequences, fully masked ones included.
        nonempty_sequences: Sequences with at least one counted token.
        statistics: This part's own merged statistics, by the name it gave them.
        context_sum: Differentiable sum over the context-parallel ranks of a per-sequence tensor;
            the identity when there are none.
        round: Which exchange the statistics come from, for parts that need several.
    """

    tokens: Tensor
    sequences: Tensor
    nonempty_sequences: Tensor
    statistics: Mapping[str, Stat]
    context_sum: Callable[[Tensor], Tensor] = _identity
    round: int = 0

    def get(self, name: str, kind: type[_Kind]) -> _Kind:
        """One of the part's own statistics, of the kind it was declared as.

        Raises:
            WindowError: If the part never declared it, or declared another kind.
        """
        stat = self[name]
        if not isinstance(stat, kind):
            raise WindowError(
                f"The window statistic {name!r} is {type(stat).__name__}; expected {kind.__name__}. Declare that kind in "
                "window_statistics, or read the one that is there."
            )
        return stat

    def __getitem__(self, name: str) -> Stat:
        """One of the part's own statistics.

        Raises:
            WindowError: If the part never declared it.
        """
        if name not in self.statistics:
            raise WindowError(
                f"No window statistic {name!r}; this part has {sorted(self.statistics) or 'none'}. "
                "Declare it in window_statistics and return it from statistics()."
            )
        return self.statistics[name]


resolve_annotations(Component)
