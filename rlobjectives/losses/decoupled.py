"""Decoupled PPO: clip against the proximal policy, correct for the one that sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratio_metrics import CLIP_METRICS, RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import (
    LOG_RATIO_CLAMP,
    Ratio,
    clamp_around,
    importance_ratio,
    log_bound,
    token_ratio,
)
from rlobjectives.maths.surrogates import clipped_surrogate
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Moments, Stat
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["DecoupledClip", "behavior_weight"]


def behavior_weight(ratio: Ratio, *, cap: float | None, over_cap: str) -> tuple[Ratio, Ratio]:
    """Hold an importance weight at a cap, or drop what is beyond it.

    Args:
        ratio: Proximal over behaviour ratio.
        cap: The bound; None leaves the weight free.
        over_cap: ``"clamp"`` gives the cap itself, ``"mask"`` gives 0.

    Returns:
        The bounded ratio, and the ratio as it came.
    """
    if cap is None:
        return ratio, ratio
    bounded = ratio.value.clamp_max(cap)
    if over_cap == "mask":  # by the logarithm, which no clamp has held
        bounded = torch.where(ratio.log > log_bound(cap), 0.0, ratio.value)
    return ratio._replace(value=bounded), ratio


@dataclass(frozen=True, kw_only=True)
class DecoupledClip(PolicyLoss):
    """PPO's clip around the proximal policy, times a constant weight from it to the policy that sampled.

        Lₜ = wₜ·max(−Aₜρₜ, −Aₜ·clip(ρₜ, 1 − low, 1 + high))        ρₜ = π/πᵖʳᵒˣ        wₜ = sg(πᵖʳᵒˣ/πᵇᵉʰ)

    ``old_logprobs`` are the proximal policy's (the weights the updates start from), ``behavior_logprobs`` the
    sampler's. With one and the same policy for both this is `ClippedSurrogate`. The weight corrects for the
    sampler: do not add another correction.

    Args:
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1; None takes `clip_low`.
        behavior_cap: Bound on the weight; None for none.
        over_cap: ``"clamp"`` holds a weight at the cap; ``"mask"`` drops the token, which stays in the
            reduction's denominator.
        log_ratio_clamp: Bound on either log-ratio before ``exp``. The default gives way to a bound that lies farther out.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        arXiv:2110.00641; for asynchronous training of language models: AReaL, arXiv:2505.24298, which caps
        the weight at 5 or drops the tokens beyond it (denominator: the original count).

    Example:
        >>> DecoupledClip(behavior_cap=5.0).reads
        ('behavior_logprobs',)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    reads = ("behavior_logprobs",)
    metrics: ClassVar[Mapping[str, Metric]] = {
        **RATIO_METRICS,
        **CLIP_METRICS,
        "policy/behavior_weight_": Metric(Moments, "ratio", "proximal over behaviour ratio, before the cap"),
        "policy/behavior_capped_fraction": Metric(Mean, "fraction", "tokens whose weight is beyond the cap"),
    }

    clip_low: float = option(0.2, low=0, high=1)
    clip_high: float | None = option(None, low=0)
    behavior_cap: float | None = option(None, low=0, open_low=True)
    over_cap: Literal["clamp", "mask"] = "clamp"
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and metrics of each token."""
        del context
        layout, mask = tokens.layout, tokens.layout.mask
        behavior = tokens.need("behavior_logprobs", "DecoupledClip")
        upper = self.clip_low if self.clip_high is None else self.clip_high
        clamp = clamp_around(self.log_ratio_clamp, 1.0 - self.clip_low, 1.0 + upper)
        ratio = token_ratio(tokens, clamp)
        weight, raw = behavior_weight(
            importance_ratio(
                tokens.old(), behavior, layout, clamp_around(self.log_ratio_clamp, self.behavior_cap)
            ),
            cap=self.behavior_cap,
            over_cap=self.over_cap,
        )
        loss = clipped_surrogate(
            ratio,
            tokens.need("advantages", "DecoupledClip"),
            layout,
            clip_low=self.clip_low,
            clip_high=upper,
        )
        found: dict[str, Stat] = {
            "policy/behavior_weight_": Moments.of(raw.value, mask),
            "policy/behavior_capped_fraction": Mean.of(weight.value != raw.value, mask),
        }
        return TokenLoss(
            weight.value * loss.value,
            weight.value * loss.slope,
            {**loss.metrics, **ratio_metrics(ratio, mask), **found},
        )
