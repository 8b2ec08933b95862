"""The one autograd function: a weighted sum of token losses whose slope is already known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlobjectives.errors import WindowError
from rlobjectives.layouts import TokenLayout

__all__ = ["weighted_sum"]


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, value: Tensor, slope: Tensor, weights: Tensor, mask: Tensor
    ) -> Tensor:
        # The only thing kept for backward is the gradient itself.
        ctx.gradient = torch.where(mask, slope * weights, 0.0).to(logprobs.dtype)
        return torch.where(mask, value * weights, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = ctx.gradient
        if gradient is None:
            raise WindowError(
                "backward ran twice through one window loss. Its gradient buffer is given away by the "
                "first; call window.loss(tokens) again for a second backward. Higher-order gradients "
                "are not supported."
            )
        ctx.gradient = None
        return gradient.mul_(grad_outputs[0]), None, None, None, None


def weighted_sum(
    logprobs: Tensor, value: Tensor, slope: Tensor, weights: Tensor, layout: TokenLayout
) -> Tensor:
    """``Σₜ wₜ·valueₜ`` over counted tokens, with gradient ``wₜ·slopeₜ`` in ``logprobs``.

    Args:
        logprobs: The differentiable column, shaped like the mask. Its values are not read.
        value: Loss of each token.
        slope: Derivative of the summed loss in each log-probability.
        weights: Weight of each token, from a reduction; shaped like the mask.
        layout: Supplies the mask: values and slopes under a false mask change nothing.

    Returns:
        0-d, in the dtype of the values; attached to the graph of ``logprobs`` even when no token counts.

    Raises:
        WindowError: In a second backward through the same result.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, False]]))
        >>> x = torch.zeros(1, 2, requires_grad=True)
        >>> one = torch.ones(1, 2)
        >>> weighted_sum(x, 2 * one, 3 * one, one / 4, layout).backward()
        >>> x.grad
        tensor([[0.7500, 0.0000]])
    """
    result: Tensor = _WeightedSum.apply(logprobs, value, slope, weights, layout.mask)  # type: ignore[no-untyped-call]
    return result
