"""Tally: statistics of one scope or many, added micro-batch by micro-batch and folded in that order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlobjectives.errors import WindowError
from rlobjectives.statistics.base import Stat, fold

__all__ = ["Tally"]


class Tally:
    """Collects statistics by name and folds each in the order in which it was added.

    Args:
        kinds: What may be added, with its kind; a name that nothing is added to folds to its kind's identity.

    Example:
        >>> from rlobjectives import Sum
        >>> tally = Tally({"tokens": Sum, "losses": Sum})
        >>> for tokens in (torch.ones(2), torch.ones(3)):
        ...     tally.add({"tokens": Sum.of(tokens)})
        >>> tally.folded()
        {'tokens': Sum(5), 'losses': Sum(0)}
        >>> tally.missing
        ['losses']
    """

    def __init__(self, kinds: Mapping[str, type[Stat]]) -> None:
        self.kinds = dict(kinds)
        self._added: dict[str, list[Stat]] = {name: [] for name in kinds}

    @property
    def missing(self) -> list[str]:
        """Names to which nothing was added, in order of the alphabet."""
        return sorted(name for name, stats in self._added.items() if not stats)

    def add(self, found: Mapping[str, Stat], scope: str = "") -> None:
        """Add the statistics of one micro-batch.

        Args:
            found: By name.
            scope: Put before each name, with a slash.

        Raises:
            WindowError: If one was not declared, or is of another kind.
        """
        if not isinstance(found, Mapping):
            raise WindowError(
                f"statistics{f' of {scope}' if scope else ''} are {type(found).__name__}; expected a dictionary of them by name."
            )
        for name, stat in found.items():
            name = f"{scope}/{name}" if scope else name
            if self.kinds.get(name) is not type(stat):
                declared = getattr(self.kinds.get(name), "__name__", "nothing")
                raise WindowError(
                    f"statistic {name!r} is a {type(stat).__name__}, but {declared} was declared. Declare every "
                    "statistic and metric of a part (window_statistics, metrics), with its kind."
                )
            self._added[name].append(stat)

    def folded(self, device: torch.device | None = None) -> dict[str, Stat]:
        """Each name's statistics as one.

        Args:
            device: Of the identity, where nothing was added; by default the CPU.
        """
        return {name: fold(kind, self._added[name], device) for name, kind in self.kinds.items()}
