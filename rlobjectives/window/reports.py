"""What a window reports, and putting the reports of several windows together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rlobjectives.statistics import Maximum, Minimum, Stat, Sum

__all__ = ["Report", "merge_reports"]

_PER_WINDOW = ("window/", "sampling/", "optim/")


class Report(dict[str, float]):
    """Metrics of a window by name, with how much each of them counted.

    Args:
        numbers: The metrics.
        weights: By name, what a mean or a standard deviation is over: tokens, sequences, groups. Numbers without one
            weigh as much as the window has tokens.

    Example:
        >>> report = Report({"policy/entropy": 2.0, "loss/total": 0.1}, {"policy/entropy": 7.0})
        >>> report["policy/entropy"], report.weights["policy/entropy"]
        (2.0, 7.0)
    """

    def __init__(self, numbers: Mapping[str, float], weights: Mapping[str, float] | None = None) -> None:
        super().__init__(numbers)
        self.weights = dict(weights or {})

    def under(self, prefixes: Iterable[str]) -> Report:
        """The metrics whose names start with one of these.

        Args:
            prefixes: Beginnings of names, such as ``"value/"``.
        """
        own = tuple(prefixes)
        return Report({name: self[name] for name in self if name.startswith(own)}, self.weights)


def merge_reports(
    reports: Sequence[Mapping[str, float]], kinds: Mapping[str, type[Stat]], *, one_set: bool = False
) -> dict[str, float]:
    """Put the reports of several windows together, each number weighing as much as what it counted.

    Logging every ten steps then gives what one window over all of them would: means and standard deviations are those
    of everything together; sums (losses, counts) are means over the windows; of extremes the most extreme stays. What
    is neither (an effective sample size, a number of your own) is averaged by the windows' tokens.

    Args:
        reports: What `Window.summarize` returned, one a window. Plain dictionaries will do, with tokens for weights.
        kinds: The statistic behind each metric: ``objective.metric_kinds()`` and those given as ``extra``.
        one_set: The windows are pieces of one data set (evaluation) and not steps: a loss weighs as much as its
            window has sequences.

    Returns:
        One number by name; names that only some of the windows report are over those.

    Example:
        >>> from rlobjectives import Mean
        >>> one = {"policy/entropy": 1.0, "window/tokens": 1.0}
        >>> merge_reports([one, {"policy/entropy": 2.0, "window/tokens": 3.0}], {"policy/entropy": Mean})
        {'policy/entropy': 1.75, 'window/tokens': 2.0}
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        found = [report for report in reports if name in report]
        values = [report[name] for report in found]
        kind = kinds.get(name)
        if kind is Maximum or kind is Minimum:
            merged[name] = max(values) if kind is Maximum else min(values)
        elif spread := _pooled(name, found):
            merged[name] = spread
        else:
            weights = _weights(name, kind, found, one_set=one_set)
            pairs = zip(values, weights, strict=True)
            merged[name] = sum(value * weight for value, weight in pairs) / sum(weights)
    return merged


def _weights(
    name: str, kind: type[Stat] | None, found: list[Mapping[str, float]], *, one_set: bool
) -> list[float]:
    equal = [1.0] * len(found)
    if name.startswith(_PER_WINDOW) or (kind is Sum and not one_set):
        return equal
    if all(isinstance(report, Report) and name in report.weights for report in found):
        weights = [report.weights[name] for report in found if isinstance(report, Report)]
    else:
        unit = "window/sequences" if kind is Sum else "window/tokens"
        weights = [report.get(unit, 0.0) for report in found]
        if not all(unit in report for report in found):
            return equal
    return weights if sum(weights) else equal


def _pooled(name: str, found: list[Mapping[str, float]]) -> float | None:
    """The standard deviation over everything together, where this is one and its counts and means are known."""
    mean = f"{name.removesuffix('std')}mean"
    if not name.endswith("std") or not all(
        isinstance(report, Report) and name in report.weights and mean in report for report in found
    ):
        return None
    rows = [
        (report.weights[name], report[mean], report[name]) for report in found if isinstance(report, Report)
    ]
    count = sum(number for number, _, _ in rows)
    centre = sum(number * middle for number, middle, _ in rows) / count
    squares = sum(
        std**2 * max(number - 1.0, 0.0) + number * (middle - centre) ** 2 for number, middle, std in rows
    )
    return math.sqrt(squares / (count - 1.0)) if count > 1 else 0.0
