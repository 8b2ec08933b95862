"""Whitening: subtract a mean and divide by a spread, the three ways the field writes it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_choice
from rlobjectives.component import WindowContext
from rlobjectives.statistics import Maximum, Minimum, Moments

__all__ = ["WHITEN_MODES", "differs", "whiten"]

WHITEN_MODES = ("add", "variance", "floor")


def differs(context: WindowContext) -> Tensor:
    """Whether the window's values are apart by more than rounding explains, 0-d bool.

    Args:
        context: With the statistics ``highest`` and ``lowest`` of the values and, where they are sums, ``rounding``: how
            far any of them may be from what was meant.
    """
    spread = context.get("highest", Maximum).value - context.get("lowest", Minimum).value
    if "rounding" not in context.statistics:
        return spread > 0.0
    return spread > 2.0 * context.get("rounding", Maximum).value


def whiten(values: Tensor, moments: Moments, *, ddof: int, epsilon: float, mode: str = "add") -> Tensor:
    """Standardise with statistics of a window.

    Args:
        values: Any shape.
        moments: Count, mean and second moment of the whole population.
        ddof: 1 sample, 0 population.
        epsilon: Stability constant: in units of the values for ``"add"``, squared units otherwise.
        mode: ``"add"`` is ``/(std + ε)``, ``"variance"`` is ``/√(var + ε)``, ``"floor"`` is
            ``/√max(var, ε)``.

    Returns:
        Float64, same shape; a value equal to the mean gives 0, even over a spread of 0. Nothing is masked here.

    Example:
        >>> import torch
        >>> values = torch.tensor([1.0, 3.0])
        >>> whiten(values, Moments.of(values), ddof=0, epsilon=0.0)
        tensor([-1.,  1.], dtype=torch.float64)
    """
    check_choice("mode", mode, WHITEN_MODES)
    variance = moments.variance(ddof)
    if mode == "add":
        divisor = variance.sqrt() + epsilon
    elif mode == "variance":
        divisor = (variance + epsilon).sqrt()
    else:
        divisor = variance.clamp_min(epsilon).sqrt()
    deviation = values.double() - moments.mean
    return torch.where(deviation == 0, 0.0, deviation / divisor)
