"""Selection: what counts stays as it is, whatever the rest holds."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["count", "select"]

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_WORTHWHILE = 1 << 12
_FORMATS = {torch.float32: ("f", "i"), torch.float64: ("d", "q")}


def select(values: Tensor, mask: Tensor, other: float = 0.0) -> Tensor:
    """The values where the mask is true and ``other`` elsewhere: never a product, for NaN · 0 is NaN.

    Args:
        values: Any shape.
        mask: Bool, of the same shape.
        other: What stands at the other places.

    Returns:
        Shaped like the values, in their dtype if that holds ``other``. Gradient: to the values where the mask is true.

    Example:
        >>> select(torch.tensor([1.0, torch.nan]), torch.tensor([True, False]), other=-torch.inf)
        tensor([1., -inf])
    """
    integer = _INTEGERS.get(values.dtype)
    if (
        integer is None
        or values.device.type != "cpu"
        or values.numel() < _WORTHWHILE
        or _differentiable(values)
    ):
        return torch.where(mask, values, _as_held(other, values.dtype))
    # On a CPU torch.where takes one element at a time, four times as long as masking the bits: 0.0 is the all-zero pattern.
    bits = values.view(integer)
    bits = bits * mask if integer is torch.int32 else bits & mask.to(integer).neg_()
    if other != 0.0:
        bits.add_(~mask, alpha=_pattern(other, values.dtype))
    return bits.view(values.dtype)


def _differentiable(values: Tensor) -> bool:
    # Backward, or forward as in torch.func.jvp: bits carry neither.
    if values.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad.unpack_dual(values).tangent is not None  # type: ignore[no-untyped-call]


def _as_held(other: float, dtype: torch.dtype) -> float:
    """The number as entries of that dtype hold it, if they can, so that integers stay what they are beside it."""
    if dtype.is_floating_point or dtype.is_complex or not float(other).is_integer():
        return other
    return bool(other) if dtype is torch.bool and other in (0, 1) else int(other)


def count(flags: Tensor) -> Tensor:
    """How many entries are true (or not 0), 0-d int64; unlike ``sum`` without an integer for each on the way."""
    return torch.count_nonzero(flags)


@functools.cache
def _pattern(number: float, dtype: torch.dtype) -> int:
    floating, integer = _FORMATS[dtype]
    pattern: int = struct.unpack(integer, struct.pack(floating, number))[0]
    return pattern
