"""Averages of window metrics between two log lines."""

from __future__ import annotations

from collections.abc import Mapping

from rlobjectives.statistics import Maximum, Stat, Sum

__all__ = ["average"]


def average(
    reports: list[dict[str, float]], kinds: Mapping[str, type[Stat]], *, one_set: bool = False
) -> dict[str, float]:
    """Put the reports of several windows together, each weighing as much as what it counted.

    Means are weighted by the window's tokens (reward metrics by its sequences), so logging every ten steps gives
    what one window over all of them would; sums (losses, counts) are means over the windows; maxima are maxima.

    Args:
        reports: What `Window.summarize` returned, one a window.
        kinds: The statistic behind each metric.
        one_set: The windows are pieces of one data set (evaluation) and not steps: a loss weighs as much as its
            window has sequences.

    Example:
        >>> from rlobjectives.statistics import Mean
        >>> one = {"policy/entropy": 1.0, "window/tokens": 1.0}
        >>> average([one, {"policy/entropy": 2.0, "window/tokens": 3.0}], {"policy/entropy": Mean})
        {'policy/entropy': 1.75, 'window/tokens': 2.0}
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        found = [report for report in reports if name in report]
        values = [report[name] for report in found]
        kind = kinds.get(name)
        if kind is Maximum:
            merged[name] = max(values)
        elif name.startswith(("window/", "sampling/")) or (kind is Sum and not one_set):
            merged[name] = sum(values) / len(values)
        else:
            by_sequence = kind is Sum or name.startswith("reward/")
            unit = "window/sequences" if by_sequence else "window/tokens"
            weights = [report.get(unit, 1.0) for report in found]
            total = sum(weights)
            merged[name] = (
                sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
                if total
                else sum(values) / len(values)
            )
    return merged
