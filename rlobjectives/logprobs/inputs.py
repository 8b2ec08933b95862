"""What both routes to a log-probability check and prepare."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import (
    check_floating,
    check_integral,
    check_mask,
    check_number,
    check_shape,
)

__all__ = ["check_inputs", "compute_dtype", "counted_rows", "rows_with_gradient"]


def check_inputs(name: str, source: Tensor, ids: Tensor, mask: Tensor | None, temperature: float) -> None:
    """Raise unless ids and mask have the leading shape of ``source`` and the temperature is positive."""
    check_floating(name, source)
    check_integral("ids", ids)
    check_shape("ids", ids, tuple(source.shape[:-1]), f"the shape of {name} without its last dimension")
    if mask is not None:
        check_mask("mask", mask)
        check_shape("mask", mask, tuple(ids.shape), "one flag per token")
    check_number("temperature", temperature, low=0.0, open_low=True)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of the softmax: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def counted_rows(mask: Tensor | None) -> Tensor | None:
    """Positions in the flattened mask that count; None where all do (no host sync then)."""
    return None if mask is None else mask.reshape(-1).nonzero().squeeze(1)


def rows_with_gradient(rows: Tensor | None, *gradients: Tensor | None) -> Tensor:
    """Of the counted rows, those into which some gradient flows.

    A row without gradient (clipped, or with a zero advantage) needs no recomputation, and a NaN in it
    cannot reach the result: it is left out, not multiplied by zero.
    """
    active: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            flat = gradient.reshape(-1) != 0  # NaN counts as a gradient: it must not vanish
            active = flat if active is None else active | flat
    assert active is not None
    if rows is None:
        return active.nonzero().squeeze(1)
    return rows[active[rows]]
