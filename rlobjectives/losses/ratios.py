"""Importance ratios: select first, clamp second, exponentiate last."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlobjectives.layouts import TokenLayout
from rlobjectives.tokens import TokenBatch

__all__ = ["LOG_RATIO_CLAMP", "Ratio", "importance_ratio", "token_ratio"]

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are held to ±20 before ``exp``: e²⁰ ≈ 5e8 is finite in every dtype that is used."""


class Ratio(NamedTuple):
    """An importance ratio and what a slope needs to know of it.

    Attributes:
        log: Log-ratio before the clamp, 0 at masked places.
        value: ``exp`` of the clamped log-ratio.
        inside: Where the clamp did nothing. Outside, the ratio is constant and its slope is 0.
    """

    log: Tensor
    value: Tensor
    inside: Tensor


def importance_ratio(
    logprobs: Tensor, other: Tensor, layout: TokenLayout, clamp: float | None = LOG_RATIO_CLAMP
) -> Ratio:
    """``exp(logprobs − other)`` at counted tokens, and 1 elsewhere.

    Args:
        logprobs: Numerator, in nats, shaped like the mask.
        other: Denominator, in nats, shaped like the mask.
        layout: Supplies the mask; NaN and infinity under a false mask never get in.
        clamp: Bound on the absolute log-ratio before ``exp``; None leaves it free (float32 overflows at
            88.7).

    Returns:
        Without gradient. A NaN at a counted token stays NaN.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True, False]]))
        >>> importance_ratio(torch.tensor([[0.0, 99.0, 1.0]]), torch.zeros(1, 3), layout).value
        tensor([[1.0000e+00, 4.8517e+08, 1.0000e+00]])
    """
    log = layout.select(logprobs.detach() - other.detach())
    if clamp is None:
        return Ratio(log, log.exp(), torch.ones_like(layout.mask))
    return Ratio(log, log.clamp(-clamp, clamp).exp(), log.abs() <= clamp)


def token_ratio(tokens: TokenBatch, clamp: float | None = LOG_RATIO_CLAMP) -> Ratio:
    """Ratio of the current policy to the one that started this round of updates, token by token."""
    return importance_ratio(tokens.logprobs, tokens.old(), tokens.layout, clamp)
