"""When two runs of a window are the same."""

from __future__ import annotations

import math

import torch

from tests.windows import Outcome

__all__ = ["assert_equal", "assert_same"]


def assert_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Loss, gradient and metrics, relative to their own size."""
    loss_scale = max(expected.scale, abs(float(expected.loss)))
    assert abs(float(found.loss - expected.loss)) <= tolerance * loss_scale, (found.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        size = float(gradient.abs().max()) if gradient.numel() else 0.0
        off = float((found.gradients[name] - gradient).abs().max()) if gradient.numel() else 0.0
        assert off <= tolerance * size, f"gradient of {name} is off by {off} of {size}"
    assert found.metrics.keys() == expected.metrics.keys()
    hairline = _hairline(found, tolerance) or _hairline(expected, tolerance)
    for name, value in expected.metrics.items():
        assert math.isfinite(value), name
        if hairline and name.endswith("fraction"):
            continue
        size = max(abs(value), _companion(name, expected.metrics), loss_scale if "loss" in name else 0.0)
        assert abs(found.metrics[name] - value) <= tolerance * size, (name, found.metrics[name], value)


def _hairline(outcome: Outcome, tolerance: float) -> bool:
    # An advantage that is zero but for rounding may fall on either side of a bound.
    size = outcome.advantages.abs()
    return bool(((size > 0) & (size <= tolerance * size.max())).any())


def _companion(name: str, metrics: dict[str, float]) -> float:
    # A mean near zero is as precise as the spread it averages, and a spread as the mean it is around.
    for one, other in (("mean", "std"), ("std", "mean")):
        if name.endswith(one):
            return abs(metrics.get(name[: -len(one)] + other, 0.0))
    return 0.0


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """Bit by bit."""
    assert torch.equal(found.loss, expected.loss)
    assert found.metrics == expected.metrics
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
