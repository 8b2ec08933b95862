"""GSPO and GSPO-token: one importance ratio for a whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.masking import select
from rlobjectives.maths.ratio_metrics import CLIP_METRICS, RATIO_METRICS, clip_metrics, ratio_metrics
from rlobjectives.maths.ratios import (
    LOG_RATIO_CLAMP,
    Ratio,
    SequenceRatio,
    clamp_around,
    sequence_ratio,
    sequence_sums,
)
from rlobjectives.options import option
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["GSPO", "GSPOToken", "sequence_surrogate"]


def sequence_surrogate(
    ratio: Ratio, advantages: Tensor, layout: TokenLayout, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """``max(−A·s, −A·clip(s, 1 − low, 1 + high))``, and its derivative in ``log s`` token by token.

    Args:
        ratio: The sequence's ratio at each of its tokens, with the token's own log-ratio for the metrics.
        advantages: Shaped like the mask.
        layout: Supplies the mask.
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.

    Returns:
        Value, ``−A·s`` where the unclipped branch rules and 0 elsewhere, and metrics.
    """
    free = -advantages * ratio.value
    bounded = -advantages * ratio.value.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = bounded > free
    slope = select(free, ratio.inside & ~clipped)
    metrics = {**clip_metrics(clipped, advantages, layout.mask), **ratio_metrics(ratio, layout.mask)}
    return TokenLoss(torch.maximum(free, bounded), slope, metrics)


@dataclass(frozen=True, kw_only=True)
class _SequenceRatioLoss(PolicyLoss):
    """What both share: options, and the ratio laid out over tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        requires_sampled_distribution=True, communicates_in_loss=True
    )
    metrics: ClassVar[Mapping[str, Metric]] = {**RATIO_METRICS, **CLIP_METRICS}

    clip_low: float = option(3e-4, low=0, high=1)
    clip_high: float | None = option(4e-4, low=0)
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    @property
    def upper(self) -> float:
        """Distance of the upper bound from 1."""
        return self.clip_low if self.clip_high is None else self.clip_high

    @property
    def clamp(self) -> float | None:
        """Bound on the mean log-ratio: `log_ratio_clamp`, where that leaves room for the bounds on the ratio."""
        return clamp_around(self.log_ratio_clamp, 1.0 - self.clip_low, 1.0 + self.upper)

    def columns(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-ratios and advantages, selected."""
        layout = tokens.layout
        log = layout.select(tokens.logprobs.detach() - tokens.old())
        return log, layout.select(tokens.need("advantages", type(self).__name__)).to(log.dtype)

    def surrogate(
        self, log: Tensor, sequences: SequenceRatio, advantages: Tensor, layout: TokenLayout
    ) -> TokenLoss:
        """The clipped surrogate with each sequence's ratio at all its tokens."""
        value = layout.expand(sequences.value.to(log.dtype))
        return sequence_surrogate(
            Ratio(log, value, layout.expand(sequences.inside)),
            advantages,
            layout,
            clip_low=self.clip_low,
            clip_high=self.upper,
        )


@dataclass(frozen=True, kw_only=True)
class GSPO(_SequenceRatioLoss):
    """The clipped surrogate with one ratio per sequence, and one gradient through it.

        sᵢ = exp( Σₜ (ℓₜ − ℓₜᵒˡᵈ) / Tᵢ )        Lᵢₜ = max(−Aᵢsᵢ, −Aᵢ·clip(sᵢ, 1 − low, 1 + high))

    Every token carries its sequence's loss, so the reduction decides how sequences weigh:
    `SequenceMean` is GSPO, `SequenceSum` weighs each by its length and is LUSPO. A reduction with
    different weights *inside* a sequence is refused. Advantages that differ inside a sequence are
    summed exactly: the slope is the true derivative of what is written above with Aᵢₜ.

    Under context parallelism the ratio is that of the whole sequence (one sum over the ranks).

    Args:
        clip_low: Distance of the lower bound from 1; three orders of magnitude below PPO's, because a mean
            of log-ratios moves so much less.
        clip_high: Distance of the upper bound from 1; None takes `clip_low`.
        log_ratio_clamp: Bound on the *mean* log-ratio before ``exp``; its slope is 0 beyond. The default gives way to
            a bound that lies farther out.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        GSPO, arXiv:2507.18071 (bounds 3e-4 and 4e-4); LUSPO, arXiv:2602.05261. verl's ``gspo`` and SkyRL
        are `GSPOToken`, with the log-ratio clamped at 10; TRL is this loss with
        ``importance_sampling_level="sequence"``. AReaL replaces A by its mean over the sequence.

    Example:
        >>> GSPO().upper
        0.0004
    """

    sequence_level: ClassVar[bool] = True

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss of each token's sequence, and the derivative of the sequence's summed loss."""
        layout = tokens.layout
        log, advantages = self.columns(tokens)
        rises, falls = advantages.clamp_min(0.0), advantages.clamp_max(0.0)
        counts, total, up, down = sequence_sums(layout, context, log, rises, falls)
        ratio = sequence_ratio(counts, total, self.clamp)
        loss = self.surrogate(log, ratio, advantages, layout)
        # Σₜ ∂Lₜ/∂s by the sign of the advantage: a bound switches off all advantages of one sign at once.
        alive = torch.where(ratio.value <= 1.0 + self.upper, up, 0.0)
        alive = alive + torch.where(ratio.value >= 1.0 - self.clip_low, down, 0.0)
        slope = torch.where(ratio.inside, -ratio.value * alive / counts.clamp_min(1.0), 0.0)
        return loss._replace(slope=layout.expand(slope.to(log.dtype)))


@dataclass(frozen=True, kw_only=True)
class GSPOToken(_SequenceRatioLoss):
    """GSPO with a gradient of its own for each token, so that advantages may differ inside a sequence.

        sᵢₜ = sg(sᵢ)·πₜ / sg(πₜ)        Lᵢₜ = max(−Aᵢₜsᵢₜ, −Aᵢₜ·clip(sᵢₜ, 1 − low, 1 + high))

    The value is `GSPO`'s; the slope is ``−Aᵢₜ·sᵢ`` at each token, so any reduction fits. With one advantage
    a sequence and equal weights inside it, the gradient is `GSPO`'s too.

    Args:
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1; None takes `clip_low`.
        log_ratio_clamp: Bound on the *mean* log-ratio before ``exp``; its slope is 0 beyond. The default gives way to
            a bound that lies farther out.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        GSPO, arXiv:2507.18071, Eq. 14-15. verl's ``gspo`` and SkyRL clamp the log-ratio from above only, at
        10.

    Example:
        >>> GSPOToken(clip_low=0.2, clip_high=None).upper
        0.2
    """

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss and slope of each token."""
        log, advantages = self.columns(tokens)
        counts, total = sequence_sums(tokens.layout, context, log)
        ratio = sequence_ratio(counts, total, self.clamp)
        return self.surrogate(log, ratio, advantages, tokens.layout)
