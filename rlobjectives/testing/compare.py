"""When two runs of a window are the same."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rlobjectives.testing.simulate import Outcome

__all__ = ["LawError", "assert_equal", "assert_same"]


class LawError(AssertionError):
    """A part breaks a law."""


def require(condition: bool, message: str) -> None:
    """Raise a `LawError` unless a condition holds."""
    if not condition:
        raise LawError(message)


def assert_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Loss, gradients and metrics, relative to their own size."""
    loss_scale = max(expected.scale, abs(float(expected.loss)))
    off = abs(float(found.loss - expected.loss))
    require(
        off <= tolerance * loss_scale, f"the loss is {float(found.loss)} instead of {float(expected.loss)}"
    )
    for name, gradient in expected.gradients.items():
        size = float(gradient.abs().max()) if gradient.numel() else 0.0
        off = float((found.gradients[name] - gradient).abs().max()) if gradient.numel() else 0.0
        require(off <= tolerance * size, f"the gradient of {name} is off by {off:g} of {size:g}")
    _same_names(found.metrics, expected.metrics)
    hairline = _hairline(found, tolerance) or _hairline(expected, tolerance)
    for name, value in expected.metrics.items():
        require(math.isfinite(value), f"the metric {name} is {value}")
        if hairline and name.endswith("fraction"):
            continue
        size = max(abs(value), _companion(name, expected.metrics), loss_scale if "loss" in name else 0.0)
        close = abs(found.metrics[name] - value) <= tolerance * size
        require(close, f"the metric {name} is {found.metrics[name]} instead of {value}")


def _same_names(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    odd = sorted(found.keys() ^ expected.keys())
    require(not odd, f"only one of both reports {', '.join(odd)}")


def _hairline(outcome: Outcome, tolerance: float) -> bool:
    # An advantage that is zero but for rounding may fall on either side of a bound.
    size = outcome.advantages.abs()
    return bool(((size > 0) & (size <= tolerance * size.max())).any())


def _companion(name: str, metrics: Mapping[str, float]) -> float:
    # A mean near zero is as precise as the spread it averages, and a spread as the mean it is around.
    for one, other in (("mean", "std"), ("std", "mean")):
        if name.endswith(one):
            return abs(metrics.get(name[: -len(one)] + other, 0.0))
    return 0.0


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """Bit by bit."""
    require(
        torch.equal(found.loss, expected.loss),
        f"the loss is {float(found.loss)} instead of {float(expected.loss)}",
    )
    _same_names(found.metrics, expected.metrics)
    for name, value in expected.metrics.items():
        require(
            found.metrics[name] == value, f"the metric {name} is {found.metrics[name]} instead of {value}"
        )
    for name, gradient in expected.gradients.items():
        require(torch.equal(found.gradients[name], gradient), f"the gradient of {name} changes")
