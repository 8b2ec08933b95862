"""P3O written out token by token in plain Python."""

from __future__ import annotations

import math


def effective_size(ratios: list[float], epsilon: float = 0.0) -> float:
    total, square = math.fsum(ratios), math.fsum(r * r for r in ratios)
    return total * total / (len(ratios) * (square + epsilon))


def divergence(log_ratio: float, clamp: float = 10.0) -> float:
    return log_ratio + math.exp(min(max(-log_ratio, -clamp), clamp)) - 1.0


def safe_slope(log_ratio: float, clamp: float = 10.0) -> float:
    return 1.0 - math.exp(min(max(-log_ratio, -clamp), clamp))


def proxy_slope(log_ratio: float, clamp: float = 10.0) -> float:
    return 1.0 if abs(log_ratio) > clamp else 1.0 - math.exp(-log_ratio)


def token(
    logprob: float, behavior: float, advantage: float, size: float, *, safe: bool = True
) -> tuple[float, float]:
    """Loss and slope of one token."""
    log_ratio = logprob - behavior
    coefficient = size if log_ratio > 0 and log_ratio > math.log(size) else min(math.exp(log_ratio), size)
    slope = safe_slope(log_ratio) if safe else proxy_slope(log_ratio)
    value = -coefficient * advantage * logprob + (1.0 - size) * divergence(log_ratio)
    return value, -coefficient * advantage + (1.0 - size) * slope
