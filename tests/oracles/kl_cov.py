"""KL-Cov over a whole window, in plain Python."""

from __future__ import annotations

import math


def covariances(logprobs: list[float], advantages: list[float]) -> list[float]:
    mean_l = math.fsum(logprobs) / len(logprobs)
    mean_a = math.fsum(advantages) / len(advantages)
    return [(x - mean_l) * (a - mean_a) for x, a in zip(logprobs, advantages, strict=True)]


def chosen(logprobs: list[float], advantages: list[float], fraction: float) -> list[bool]:
    """The largest ⌊fraction·N⌋ covariances, one at least; equal ones together, and positive ones only."""
    shares = covariances(logprobs, advantages)
    count = max(1, math.floor(fraction * len(shares) + 1e-9))
    threshold = sorted(shares, reverse=True)[count - 1]
    return [share >= threshold and share > 0 for share in shares]


def kl_cov(
    logprobs: list[float],
    old: list[float],
    advantages: list[float],
    fraction: float,
    coef: float,
    divergence: str = "abs",
) -> tuple[list[float], list[float]]:
    """Loss and slope of every token."""
    values, slopes = [], []
    for picked, new, before, advantage in zip(
        chosen(logprobs, advantages, fraction), logprobs, old, advantages, strict=True
    ):
        log = new - before
        ratio = math.exp(log)
        value, slope = -advantage * ratio, -advantage * ratio
        if picked:
            penalty, pull = {
                "abs": (abs(log), float(log > 0) - float(log < 0)),
                "k2": (log * log / 2, log),
                "k3": (math.expm1(log) - log, math.expm1(log)),
            }[divergence]
            value, slope = value + coef * penalty, slope + coef * pull
        values.append(value)
        slopes.append(slope)
    return values, slopes
