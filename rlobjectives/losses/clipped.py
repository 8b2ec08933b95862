"""PPO's clipped surrogate, symmetric or not, with dual clip and TRL's ratio cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import check_number
from rlobjectives.component import Metric, WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import PolicyLoss, TokenLoss
from rlobjectives.losses.ratios import LOG_RATIO_CLAMP, Ratio, clamp_around, token_ratio
from rlobjectives.masking import select
from rlobjectives.options import option
from rlobjectives.statistics import Maximum, Mean, Moments, Stat
from rlobjectives.tokens import TokenBatch

__all__ = [
    "CLIP_METRICS",
    "HELD_METRICS",
    "RATIO_METRICS",
    "ClippedSurrogate",
    "clip_metrics",
    "clipped_surrogate",
    "ratio_metrics",
]

RATIO_METRICS: Mapping[str, Metric] = {
    "policy/ratio_": Metric(Moments, "ratio", "importance ratio to the old policy, mean and std"),
    "policy/ratio_max": Metric(Maximum, "ratio", "largest importance ratio"),
    "policy/kl_to_old": Metric(Mean, "nats/token", "k3 estimate of the divergence to the old policy"),
}
CLIP_METRICS: Mapping[str, Metric] = {
    "policy/clip_fraction": Metric(Mean, "fraction", "tokens whose clipped branch is active (no gradient)"),
    "policy/clip_low_fraction": Metric(
        Mean, "fraction", "tokens clipped at the lower bound (negative advantage)"
    ),
    "policy/clip_high_fraction": Metric(
        Mean, "fraction", "tokens clipped at the upper bound (positive advantage)"
    ),
}
HELD_METRICS: Mapping[str, Metric] = {
    "policy/dual_clip_fraction": Metric(Mean, "fraction", "tokens held by the dual clip or the ratio cap"),
}


def ratio_metrics(ratio: Ratio, mask: Tensor) -> dict[str, Stat]:
    """Mean, spread, maximum and k3 of a ratio over the counted tokens."""
    log = ratio.log.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {
        "policy/ratio_": Moments.of(ratio.value, mask),
        "policy/ratio_max": Maximum.of(ratio.value, mask),
        "policy/kl_to_old": Mean.of(torch.expm1(log) - log, mask),
    }


def clip_metrics(clipped: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Stat]:
    """Fractions of the counted tokens whose bound is active, by the sign of the advantage."""
    low, high = clipped & (advantages < 0), clipped & (advantages > 0)
    return {
        "policy/clip_fraction": Mean.of(clipped, mask),
        "policy/clip_low_fraction": Mean.of(low, mask),
        "policy/clip_high_fraction": Mean.of(high, mask),
    }


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


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(PolicyLoss):
    """The clipped surrogate of PPO, token by token.

        ρₜ = exp(ℓₜ − ℓₜᵒˡᵈ)        Lₜ = max(−Aₜρₜ, −Aₜ·clip(ρₜ, 1 − low, 1 + high))

    The slope is ``−Aₜρₜ`` where the unclipped branch rules and 0 where the clipped one does. A zero
    advantage is never "clipped". Beyond ``log_ratio_clamp`` the ratio is constant and its slope is 0.

    Args:
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1; None takes `clip_low`. DAPO uses 0.28.
        dual_clip: Bound c > 1 on the loss of negative advantages, ``−c·A``; off by default (verl: 3).
        ratio_cap: Cap on the ratio in the *unclipped* branch, both signs (TRL's ``delta``,
            INTELLECT-2); off by default. Must exceed ``1 + clip_high``.
        log_ratio_clamp: Bound on the log-ratio before ``exp``; None for none. The default gives way to a bound that lies
            farther out.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        PPO, arXiv:1707.06347; asymmetric bounds: DAPO, arXiv:2503.14476, Eq. 10; dual clip:
        arXiv:1912.09729; ratio cap: arXiv:2505.07291. TRL, slime and AReaL do not clamp the log-ratio.

    Example:
        >>> from rlobjectives import Objective, GRPO
        >>> Objective(estimator=GRPO(), policy_loss=ClippedSurrogate(clip_high=0.28)).policy_loss.clip_high
        0.28
    """

    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    metrics: ClassVar[Mapping[str, Metric]] = {**RATIO_METRICS, **CLIP_METRICS, **HELD_METRICS}
    examples = (
        {"clip_high": 0.28},
        {"dual_clip": 3.0},
        {"ratio_cap": 2.0},
        {"dual_clip": 1.5, "ratio_cap": 1.4, "clip_low": 0.1},
        {"log_ratio_clamp": 5.0},
    )

    clip_low: float = option(0.2, low=0, high=1)
    clip_high: float | None = option(None, low=0)
    dual_clip: float | None = option(None, low=1, open_low=True)
    ratio_cap: float | None = None
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    def check(self) -> None:
        """The cap lies above the clip."""
        if self.ratio_cap is not None:
            check_number("ratio_cap", self.ratio_cap, low=1.0 + self.upper, open_low=True)

    @property
    def upper(self) -> float:
        """Distance of the upper bound from 1."""
        return self.clip_low if self.clip_high is None else self.clip_high

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and ratio metrics of each token."""
        del context
        bounds = (1.0 - self.clip_low, 1.0 + self.upper, self.dual_clip, self.ratio_cap)
        ratio = token_ratio(tokens, clamp_around(self.log_ratio_clamp, *bounds))
        loss = clipped_surrogate(
            ratio,
            tokens.need("advantages", "ClippedSurrogate"),
            tokens.layout,
            clip_low=self.clip_low,
            clip_high=self.upper,
            dual_clip=self.dual_clip,
            ratio_cap=self.ratio_cap,
        )
        return loss._replace(metrics={**loss.metrics, **ratio_metrics(ratio, tokens.layout.mask)})
