"""Surrogates that several losses share: value and slope per token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.layouts import TokenLayout
from rlobjectives.masking import select
from rlobjectives.maths.ratio_metrics import clip_metrics
from rlobjectives.maths.ratios import Ratio
from rlobjectives.statistics import Mean
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["clipped_surrogate", "weighted_gradient"]


def clipped_surrogate(
    ratio: Ratio,
    advantages: Tensor,
    layout: TokenLayout,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """``max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high))`` and its slope.

    At a tie the unclipped branch rules, so that ρ exactly at a bound keeps its gradient.

    Args:
        ratio: Importance ratio.
        advantages: Shaped like the mask.
        layout: Supplies the mask.
        clip_low: Distance of the lower bound from 1, a number or 0-d.
        clip_high: Distance of the upper bound from 1, a number or 0-d.
        dual_clip: For A < 0 the loss is at most ``−c·A``.
        ratio_cap: The unclipped branch uses ``min(ρ, cap)``.

    Returns:
        Value, slope (0 where a bound rules) and clip metrics. Without gradient.
    """
    advantages = layout.select(advantages).to(ratio.value.dtype)
    free, live = ratio.value, ratio.inside
    if ratio_cap is not None:
        live = live & (free <= ratio_cap)
        free = free.clamp_max(ratio_cap)
    loss = -advantages * free
    bounded = -advantages * ratio.value.clamp(1.0 - clip_low, 1.0 + clip_high)  # type: ignore[arg-type]
    clipped = bounded > loss
    value = torch.maximum(loss, bounded)
    slope = select(loss, live & ~clipped)
    held = torch.zeros_like(clipped)
    if ratio_cap is not None:
        held = (advantages != 0) & (ratio.value > ratio_cap) & ~clipped
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        over = (advantages < 0) & (value > ceiling)
        value, slope, held = (
            torch.where(over, ceiling, value),
            select(slope, ~over),
            held | over,
        )
    mask = layout.mask
    metrics = clip_metrics(clipped, advantages, mask)
    if dual_clip is not None or ratio_cap is not None:
        metrics["policy/dual_clip_fraction"] = Mean.of(held, mask)
    return TokenLoss(value, slope, metrics)


def weighted_gradient(weight: Tensor, tokens: TokenBatch, reader: str) -> TokenLoss:
    """``−wₜ·Aₜ·ℓₜ`` with a constant weight; slope ``−wₜ·Aₜ``.

    Args:
        weight: Shaped like the mask, or broadcastable to it.
        tokens: One micro-batch.
        reader: Who reads the advantages, for the message when they are missing.
    """
    layout, logprobs = tokens.layout, tokens.logprobs.detach()
    advantages = layout.select(tokens.need("advantages", reader)).to(logprobs.dtype)
    slope = -weight.to(logprobs.dtype) * advantages
    return TokenLoss(slope * layout.select(logprobs), slope)
