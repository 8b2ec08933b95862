"""The one autograd function: a loss whose gradient in each column is already known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlobjectives.errors import WindowError
from rlobjectives.layouts import TokenLayout

__all__ = ["weighted_sum", "with_gradients"]


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *columns: Tensor) -> Tensor:
        del columns
        ctx.gradients = gradients  # the only thing kept for backward
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise WindowError(
                "backward ran twice through one window loss. Its gradient buffer is given away by the "
                "first; call window.loss(tokens) again for a second backward. Higher-order gradients "
                "are not supported."
            )
        ctx.gradients = None
        return None, None, *(gradient.mul_(grad_outputs[0]) for gradient in gradients)


def with_gradients(loss: Tensor, columns: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """The loss, attached to the graph of the columns: backward hands each its gradient, times what comes in.

    Args:
        loss: 0-d, without gradient.
        columns: What the loss was computed from. Their values are not read.
        gradients: Derivative of the loss in each column, of its shape and dtype. Given away: backward scales them
            in place.

    Raises:
        WindowError: In a second backward through the same result.

    Example:
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> with_gradients(torch.tensor(9.0), [x], [torch.tensor([6.0])]).backward()
        >>> x.grad
        tensor([6.])
    """
    result: Tensor = _WithGradients.apply(loss, gradients, *columns)  # type: ignore[no-untyped-call]
    return result


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
    for name, column in (("logprobs", logprobs), ("value", value), ("slope", slope), ("weights", weights)):
        layout.check(name, column)
    gradient = layout.select((slope * weights).detach()).to(logprobs.dtype)
    return with_gradients(layout.select((value * weights).detach()).sum(), [logprobs], [gradient])
