"""Putting the reports of several windows together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlobjectives.statistics import Maximum, Minimum, Stat, Sum

__all__ = ["merge_reports"]

_PER_WINDOW = ("window/", "sampling/", "optim/")
_PER_SEQUENCE = ("reward/", "group/", "response/")


def merge_reports(
    reports: Sequence[Mapping[str, float]], kinds: Mapping[str, type[Stat]], *, one_set: bool = False
) -> dict[str, float]:
    """Put the reports of several windows together, each weighing as much as what it counted.

    Means are weighted by the window's tokens (those of rewards, groups and responses by its sequences), so that
    logging every ten steps gives what one window over all of them would; sums (losses, counts) are means over the
    windows; of extremes the most extreme stays. A standard deviation is the mean of the windows' own.

    Args:
        reports: What `Window.summarize` returned, one a window.
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
            continue
        per_sequence = name.startswith(_PER_SEQUENCE) and not name.endswith("token_fraction")
        unit = "window/sequences" if per_sequence or (kind is Sum and one_set) else "window/tokens"
        if name.startswith(_PER_WINDOW) or (kind is Sum and not one_set):
            unit = ""
        weights = [report.get(unit, 0.0) for report in found]
        if not all(unit in report for report in found) or not sum(weights):
            weights = [1.0] * len(found)
        pairs = zip(values, weights, strict=True)
        merged[name] = sum(value * weight for value, weight in pairs) / sum(weights)
    return merged
