"""DPPO: a trust region measured on probabilities, not on their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.masking import select
from rlobjectives.maths.ratio_metrics import (
    CLIP_METRICS,
    RATIO_METRICS,
    WEIGHT_METRICS,
    clip_metrics,
    ratio_metrics,
)
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, base_logprobs, clamp_around, importance_ratio
from rlobjectives.maths.surrogates import weighted_gradient
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Stat
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["DPPO", "binary_kl", "outside_trust_region"]

THRESHOLDS = {"tv": 0.15, "kl": 0.05}
STABILITY = 1e-8


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL between "this token or any other" under two policies: ``q·log(q/p) + (1 − q)·log((1 − q)/(1 − p))``.

    Args:
        logprobs: ``log p`` of the current policy.
        other: ``log q`` of the other one.

    Returns:
        In nats; 1e-8 is added to both complements, so that a certain token stays finite.

    Example:
        >>> binary_kl(torch.tensor([0.5]).log(), torch.tensor([0.5]).log())
        tensor([0.])
    """
    rest, other_rest = -torch.expm1(logprobs.clamp_max(0.0)), -torch.expm1(other.clamp_max(0.0))
    return other.exp() * (other - logprobs) + other_rest * torch.log(
        (other_rest + STABILITY) / (rest + STABILITY)
    )


def outside_trust_region(
    logprobs: Tensor,
    other: Tensor,
    advantages: Tensor,
    *,
    divergence: str,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Which tokens are beyond the threshold *and* would be pushed further.

    Args:
        logprobs: Current log-probabilities.
        other: Those of the policy that the region is around.
        advantages: Of the same shape; A > 0 raises the token's probability.
        divergence: ``"tv"``, ``|p − q|``; or ``"kl"``, `binary_kl`.
        clip_low: Threshold for tokens pushed down.
        clip_high: Threshold for tokens pushed up.

    Returns:
        Bool. A zero advantage is never outside.
    """
    shift = logprobs.exp() - other.exp()
    distance = shift.abs() if divergence == "tv" else binary_kl(logprobs, other)
    up = (advantages > 0) & (shift > 0) & (distance > clip_high)
    down = (advantages < 0) & (shift < 0) & (distance > clip_low)
    return up | down


@dataclass(frozen=True, kw_only=True)
class DPPO(PolicyLoss):
    """The policy gradient inside a trust region on the token's *probability*.

        Lₜ = −keepₜ·min(ρₜ, cap)·Aₜ·ℓₜ        keepₜ = 0 where D(πᵒˡᵈ, π) > threshold and A pushes further

    A ratio of 3 on a token of probability 1e-4 moves nothing; 0.9 on a near-certain token moves a lot. PPO's
    clip treats them the other way round. Weight and mask are constants; slope ``−keepₜ·min(ρₜ, cap)·Aₜ``.

    Args:
        divergence: ``"tv"``: total variation of "this token or another", ``|π − πᵒˡᵈ|``; ``"kl"``: its KL.
        clip_low: Threshold for A < 0, in the divergence's unit; None takes 0.15 (tv) or 0.05 (kl).
        clip_high: Threshold for A > 0; None takes `clip_low`.
        ratio_cap: Upper bound on the importance weight.
        base: The policy that region and ratio are around: ``"old"``, or ``"behavior"``, the one that sampled.
        log_ratio_clamp: Bound on the log-ratio before ``exp``. The default gives way to a cap that lies farther out.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        DPPO, arXiv:2602.04879 (around the policy that sampled). verl's ``dppo_tv`` and ``dppo_kl`` are around
        the old policy with a cap of 20. prime-rl keeps the gradient in ρ and adds a squared log-ratio.

    Example:
        >>> DPPO(divergence="kl").thresholds
        (0.05, 0.05)
    """

    straight_through = True
    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    metrics: ClassVar[Mapping[str, Metric]] = {**RATIO_METRICS, **CLIP_METRICS, **WEIGHT_METRICS}

    divergence: Literal["tv", "kl"] = "tv"
    clip_low: float | None = option(None, low=0)
    clip_high: float | None = option(None, low=0)
    ratio_cap: float = option(20.0, low=0, open_low=True)
    base: Literal["old", "behavior"] = "old"
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    @property
    def thresholds(self) -> tuple[float, float]:
        """Thresholds for tokens pushed down and up."""
        low = THRESHOLDS[self.divergence] if self.clip_low is None else self.clip_low
        return low, low if self.clip_high is None else self.clip_high

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities, when the region is around them."""
        return (read("behavior_logprobs"),) if self.base == "behavior" else ()

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and metrics of each token."""
        del context
        layout, mask = tokens.layout, tokens.layout.mask
        other = base_logprobs(tokens, self.base, "DPPO")
        clamp = clamp_around(self.log_ratio_clamp, self.ratio_cap)
        ratio = importance_ratio(tokens.logprobs, other, layout, clamp)
        advantages = layout.select(tokens.need("advantages", "DPPO"))
        low, high = self.thresholds
        outside = outside_trust_region(
            layout.select(tokens.logprobs.detach()),
            layout.select(other),
            advantages,
            divergence=self.divergence,
            clip_low=low,
            clip_high=high,
        )
        weight = ratio.value.clamp_max(self.ratio_cap)
        held: dict[str, Stat] = {"policy/weight_bounded_fraction": Mean.of(weight != ratio.value, mask)}
        loss = weighted_gradient(select(weight, ~outside), tokens, "DPPO")
        return loss._replace(
            metrics={**ratio_metrics(ratio, mask), **clip_metrics(outside, advantages, mask), **held}
        )
