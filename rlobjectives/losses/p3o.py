"""P3O: a policy gradient capped by the effective sample size, and a divergence for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.columns import TAUGHT, Read, read
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP
from rlobjectives.options import option
from rlobjectives.statistics import Maximum, Mean, Moments, Stat
from rlobjectives.statistics.distributions import EffectiveSize, effective_size
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["P3O", "behavior_divergence", "capped_score", "segment_effective_size"]

EXPONENT_CLAMP = 10.0
"""Bound on the exponent of the behaviour divergence, as published."""

_WIDEST_SPREAD = 170.0


def capped_score(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, cap: Tensor) -> TokenLoss:
    """``−min(ρ, cap)·A·ℓ`` with the coefficient held constant; slope ``−min(ρ, cap)·A``.

    Args:
        log_ratio: ``log ρ``, any shape. No upper clamp is needed: a cap of at most 1 bounds the exponent.
        logprobs: ℓ, in nats.
        advantages: A.
        cap: In [0, 1], 0-d or of the same shape.

    Returns:
        Value and slope, without gradient.

    Example:
        >>> one = torch.ones(1)
        >>> capped_score(torch.tensor([500.0]), -2 * one, one, torch.tensor(0.5)).slope
        tensor([-0.5000])
    """
    ratio = log_ratio.clamp_max(0.0).exp()
    slope = -torch.minimum(ratio, cap.to(ratio.dtype)) * advantages
    return TokenLoss(slope * logprobs, slope)


def behavior_divergence(
    log_ratio: Tensor, *, safe: bool = True, clamp: float = EXPONENT_CLAMP
) -> tuple[Tensor, Tensor]:
    """One sample's estimate of ``KL(π_b ‖ π)``: ``K = l + exp(clip(−l, ±clamp)) − 1`` with ``l = log π − log
    π_b``.

    Args:
        log_ratio: ``l`` in nats, any shape.
        safe: Take the slope ``1 − exp(clip(−l, ±clamp))``, which always points back to the behaviour policy.
            The derivative of the clamped value is +1 for ``l < −clamp``: it pushes further away.
        clamp: Bound on the exponent.

    Returns:
        Value in nats, the same for both slopes, and slope; without gradient.

    Example:
        >>> far = torch.tensor([-50.0])
        >>> behavior_divergence(far)[1] < 0, behavior_divergence(far, safe=False)[1]
        (tensor([True]), tensor([1.]))
    """
    growth = torch.expm1((-log_ratio).clamp(-clamp, clamp))
    slope = -growth
    if not safe:
        slope = torch.where(log_ratio.abs() <= clamp, slope, 1.0)
    return log_ratio + growth, slope


def segment_effective_size(
    log_weights: Tensor, layout: TokenLayout, context: WindowContext, *, whole: bool, epsilon: float = 0.0
) -> Tensor:
    """Normalised effective sample size of each sequence, or of the micro-batch as a whole.

    Weights are taken relative to the segment's geometric mean, and a token further than 170 nats from it
    counts as if it were 170 nats away, so that only sums have to cross context-parallel ranks.

    Args:
        log_weights: Shaped like the mask.
        layout: Supplies the mask and the sequences.
        context: Supplies the sum over context-parallel ranks.
        whole: One number for the micro-batch.
        epsilon: Added to ``Σw²``.

    Returns:
        Float64 in [0, 1], shaped like the mask; 1 for a segment without tokens.
    """

    def total(per_token: Tensor) -> Tensor:
        sums = layout.segment_sum(per_token)
        return sums.sum().reshape(1) if whole else sums

    def spread(per_segment: Tensor) -> Tensor:
        return per_segment.expand(layout.shape) if whole else layout.expand(per_segment)

    log = layout.select(log_weights).to(torch.float64)
    count, mean = context.context_sum(torch.stack([total(torch.ones_like(log)), total(log)]))
    mean = mean / count.clamp_min(1.0)
    gap = (log - spread(mean)).clamp(-_WIDEST_SPREAD, _WIDEST_SPREAD)
    first, second = context.context_sum(torch.stack([total(gap.exp()), total((2.0 * gap).exp())]))
    return spread(effective_size(count, mean, first, second, epsilon))


_METRICS: Mapping[str, Metric] = {
    "p3o/ess": Metric(Mean, "fraction", "normalised effective sample size, in the scope of ess_scope"),
    "p3o/cap": Metric(Mean, "ratio", "cap on the importance ratio"),
    "p3o/capped_fraction": Metric(Mean, "fraction", "tokens whose ratio is above the cap"),
    "p3o/behavior_kl": Metric(Mean, "nats/token", "divergence from the behaviour policy"),
    "p3o/adaptive_kl_loss": Metric(
        Mean, "nats/token", "that divergence times one minus the effective sample size"
    ),
    "policy/ratio_": Metric(Moments, "ratio", "importance ratio to the behaviour policy, mean and std"),
    "policy/ratio_max": Metric(Maximum, "ratio", "largest importance ratio"),
}


@dataclass(frozen=True, kw_only=True)
class P3O(PolicyLoss):
    """P3O: a policy gradient whose trust follows from how far the samples have gone stale.

        lₜ = ℓₜ − ℓₜᵇ      ρₜ = exp lₜ      e = (Σρ)² / (N·Σρ²)
        Lₜ = −min(ρₜ, e)·Aₜ·ℓₜ + (1 − e)·Kₜ      Kₜ = lₜ + exp(clip(−lₜ, ±10)) − 1

    ``min(ρ, e)``, ``A`` and ``e`` are constants: the slope is ``−min(ρₜ, e)·Aₜ + (1 − e)·K′ₜ``. On policy e
    is 1, and what is left is the plain policy gradient. There is no clip, no branch on the sign of A and no
    lower bound.

    The effective sample size e is computed in float64 relative to the largest ratio, so neither an overflow
    nor the scale of ρ changes it; it stays on the device.

    Args:
        ess_scope: ``"step"``: over all tokens of the window, which needs the window's log-probabilities
            before the first loss and is the only choice that does not depend on how the window is cut.
            ``"micro_batch"``: over this rank's micro-batch. ``"sequence"``: one e for each sequence.
        kl_mode: ``"proxy_safe"``: the K above with the slope ``1 − exp(clip(−l, ±10))``. ``"proxy"``: the
            same value with the derivative of the clamp, +1 for l < −10, which pushes *away* from the
            behaviour policy. ``"exact"``: `TokenBatch.behavior_kl`, over the whole vocabulary.
        epsilon: Added to ``Σρ²``. FeynRL's 1e-8 makes e depend on the scale of ρ (1e-5 everywhere gives
            0.04).
        exponent_clamp: Bound on the exponent of K.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        arXiv:2605.12380, Eq. 7, 11, 12. The paper and FeynRL take e per micro-batch (FeynRL over the
        data-parallel ranks as well), the paper a full-vocabulary K. FeynRL's form on one rank:
        ``ess_scope="micro_batch", kl_mode="proxy", epsilon=1e-8``; its fallback to e = 1 on a non-finite
        ratio is an error here.

    Example:
        >>> from rlobjectives import GRPO, Objective
        >>> Objective(estimator=GRPO(), policy_loss=P3O()).capabilities.needs_prepass
        True
    """

    straight_through = True
    metrics: ClassVar[Mapping[str, Metric]] = _METRICS

    ess_scope: Literal["step", "micro_batch", "sequence"] = "step"
    kl_mode: Literal["proxy_safe", "proxy", "exact"] = "proxy_safe"
    epsilon: float = option(0.0, low=0)
    exponent_clamp: float = option(EXPONENT_CLAMP, low=0, open_low=True)

    def required(self) -> Capabilities:
        """A pass before the losses in step scope; an exchange inside the loss otherwise."""
        step = self.ess_scope == "step"
        own = Capabilities(
            requires_sampled_distribution=True,
            depends_on_cut=self.ess_scope == "micro_batch",
            communicates_in_loss=not step,
        )
        return super().required().merge(own)

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities; the divergence from them, when it is exact."""
        exact = (read("behavior_kl"),) if self.kl_mode == "exact" else ()
        return (read("behavior_logprobs"), *exact)

    def declared_statistics(self) -> Mapping[str, type[Stat]]:
        """The window's weights, in step scope."""
        return {"weights": EffectiveSize} if self.ess_scope == "step" else {}

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """A sequence mask, a critic, a teacher and a correction of the trainer's own are refused; a part's refuses by itself."""
        if facts.importance_correction:
            yield _NO_CORRECTION.format("the trainer's own importance weights")
        if "off_policy_mask" in parts:
            yield _NO_CORRECTION.format(type(parts["off_policy_mask"]).__name__)
        columns = {name for part in parts.values() for name in part.required().reads}
        if "values" in columns or facts.gives("values"):
            yield _NO_CRITIC
        if not columns.isdisjoint(TAUGHT):
            yield _NO_TEACHER

    def statistics(self, tokens: TokenBatch, context: WindowContext) -> dict[str, Stat]:
        """Ratios of one micro-batch."""
        del context
        return {"weights": EffectiveSize.of(self._log_ratio(tokens), tokens.layout.mask)}

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and metrics of each token."""
        layout, mask = tokens.layout, tokens.layout.mask
        log = self._log_ratio(tokens)
        logprobs = layout.select(tokens.logprobs.detach())
        advantages = layout.select(tokens.need("advantages", "P3O")).to(log.dtype)
        size = self._effective_size(log, layout, context)
        cap, rest = size.to(log.dtype), (1.0 - size).to(log.dtype)
        score = capped_score(log, logprobs, advantages, cap)
        slopes: dict[str, Tensor] = {}
        if self.kl_mode == "exact":
            divergence = layout.select(tokens.need("behavior_kl", "P3O(kl_mode='exact')").detach()).to(
                log.dtype
            )
            pull = torch.zeros_like(log)
            slopes["behavior_kl"] = rest.expand(layout.shape)
        else:
            divergence, pull = behavior_divergence(
                log, safe=self.kl_mode == "proxy_safe", clamp=self.exponent_clamp
            )
        ratio = log.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        spread = size.expand(layout.shape)
        metrics: dict[str, Stat] = {
            "p3o/ess": Mean.of(spread, mask),
            "p3o/cap": Mean.of(spread, mask),
            "p3o/capped_fraction": Mean.of(log > spread.log(), mask),
            "p3o/behavior_kl": Mean.of(divergence, mask),
            "p3o/adaptive_kl_loss": Mean.of(rest * divergence, mask),
            "policy/ratio_": Moments.of(ratio, mask),
            "policy/ratio_max": Maximum.of(ratio, mask),
        }
        return TokenLoss(score.value + rest * divergence, score.slope + rest * pull, metrics, slopes)

    def _log_ratio(self, tokens: TokenBatch) -> Tensor:
        behavior = tokens.need("behavior_logprobs", "P3O")
        return tokens.layout.select(tokens.logprobs.detach() - behavior)

    def _effective_size(self, log: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        if self.ess_scope == "step":
            return context.get("weights", EffectiveSize).value(self.epsilon)
        whole = self.ess_scope == "micro_batch"
        return segment_effective_size(log, layout, context, whole=whole, epsilon=self.epsilon)


_NO_CORRECTION = (
    "its ratio is already taken against the policy that sampled and capped by the effective sample size; {} "
    "on top would count the same mismatch twice. Leave it out, or choose a loss with a ratio to the old "
    "policy."
)
_NO_CRITIC = (
    "its advantages are group-relative; values of a critic are fitted to stale samples, and neither the cap "
    "nor the divergence term corrects them. Use a group estimator (GRPO) without a critic."
)
_NO_TEACHER = (
    "its divergence term pulls towards the behaviour policy with a weight that balances the capped score; a "
    "teacher pulls elsewhere with a weight of its own, and nothing balances the two. Distil with another "
    "policy loss."
)
