"""M2PO's thresholds by sorting, in plain Python."""

from __future__ import annotations

import math


def harmful(log_ratios: list[float], advantages: list[float]) -> list[int]:
    return [i for i, (d, a) in enumerate(zip(log_ratios, advantages, strict=True)) if a * d > 0]


def _runs_out(values: list[float], budget: float) -> int | None:
    """First position in the sorted values whose level would exceed the budget."""
    below, count = 0.0, len(values)
    for position, value in enumerate(values):
        if below + value * (count - position) > budget * count:
            return position
        below += value
    return None


def water_level(values: list[float], budget: float) -> float | None:
    """The τ² that solves Σ min(v, τ²) = n·budget; None when nothing has to be bounded."""
    ordered = sorted(values)
    position = _runs_out(ordered, budget)
    if position is None:
        return None
    return (len(ordered) * budget - math.fsum(ordered[:position])) / (len(ordered) - position)


def released_level(values: list[float], budget: float) -> float | None:
    """The breakpoint before the one at which the budget runs out."""
    ordered = sorted(values)
    position = _runs_out(ordered, budget)
    if position is None:
        return None
    return max(ordered[position - 1] - 1e-12, 0.0) if position else 0.0


def kept(values: list[float], budget: float) -> list[bool]:
    """Drop from the top until the mean of the rest is below budget; equal values share their fate."""
    levels = sorted(set(values))
    chosen = levels[0] if levels else 0.0
    for level in levels:
        rest = [v for v in values if v <= level]
        if math.fsum(rest) / len(rest) < budget:
            chosen = max(chosen, level)
    return [v <= chosen for v in values]


def mean_bounded(values: list[float], level: float | None) -> float:
    bound = math.inf if level is None else level
    return math.fsum(min(v, bound) for v in values) / len(values)


def clipped(
    log_ratio: float, advantage: float, level: float | None, floor_low: float, floor_high: float
) -> tuple[float, float]:
    """Loss and slope of one token."""
    bound = 20.0 if level is None else math.sqrt(level)
    low = 1.0 - max(1.0 - math.exp(-bound), floor_low)
    high = 1.0 + max(math.exp(bound) - 1.0, floor_high)
    ratio = math.exp(log_ratio)
    free, bounded = -advantage * ratio, -advantage * min(max(ratio, low), high)
    return (bounded, 0.0) if bounded > free else (free, free)
