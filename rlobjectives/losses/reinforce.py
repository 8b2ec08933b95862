"""The plain policy gradient, with an importance weight when the samples are not the policy's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratio_metrics import RATIO_METRICS, WEIGHT_METRICS, ratio_metrics
from rlobjectives.maths.ratios import (
    LOG_RATIO_CLAMP,
    base_logprobs,
    clamp_around,
    importance_ratio,
    sequence_sums,
)
from rlobjectives.maths.surrogates import weighted_gradient
from rlobjectives.options import option
from rlobjectives.statistics import Mean
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["Reinforce"]


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyLoss):
    """REINFORCE: ``Lₜ = −wₜ·Aₜ·ℓₜ``, slope ``−wₜ·Aₜ``, with the constant w = 1 unless asked for.

    Without a weight there is nothing to correct with, so samples must come from the current policy: one
    update a rollout, no staleness.

    Args:
        weight: ``"none"``; ``"token"``, ``wₜ = exp(ℓₜ − ℓₜᵒˡᵈ)``; or ``"sequence"``, the product of those
            over the whole sequence (unbiased for sequence rewards, and of enormous variance).
        weight_cap: Upper bound on the weight; None for no bound but the clamp at e²⁰.
        base: What the weight is taken against: ``"old"`` or ``"behavior"``, the policy that sampled.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        Williams 1992; as the objective of RLOO: arXiv:2402.14740; truncated weights: TIS, Ionides 2008.

    Example:
        >>> Reinforce().required().requires_on_policy, Reinforce(weight="token").required().requires_on_policy
        (True, False)
    """

    weight: Literal["none", "token", "sequence"] = "none"
    weight_cap: float | None = option(None, low=0, open_low=True)
    base: Literal["old", "behavior"] = "old"

    @property
    def straight_through(self) -> bool:
        """With a weight, which takes no gradient."""
        return self.weight != "none"

    def required(self) -> Capabilities:
        """Fresh samples without a weight; the distribution that sampled with one."""
        if self.weight == "none":
            return Capabilities(requires_on_policy=True)
        own = Capabilities(requires_sampled_distribution=True, communicates_in_loss=self.weight == "sequence")
        return super().required().merge(own)

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities, when the weight is taken against them."""
        return (read("behavior_logprobs"),) if self.weight != "none" and self.base == "behavior" else ()

    def declared_metrics(self) -> Mapping[str, Metric]:
        """Those of the ratio, where there is one."""
        return {} if self.weight == "none" else {**RATIO_METRICS, **WEIGHT_METRICS}

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss and slope of each token."""
        layout = tokens.layout
        if self.weight == "none":
            return weighted_gradient(tokens.logprobs.new_ones(()), tokens, "Reinforce")
        clamp = clamp_around(LOG_RATIO_CLAMP, self.weight_cap)
        assert clamp is not None
        ratio = importance_ratio(
            tokens.logprobs, base_logprobs(tokens, self.base, "Reinforce"), layout, clamp
        )
        raw: Tensor = ratio.value
        if self.weight == "sequence":
            _, total = sequence_sums(layout, context, ratio.log)
            raw = layout.expand(total.clamp(-clamp, clamp).exp())
        weight = raw if self.weight_cap is None else raw.clamp_max(self.weight_cap)
        bounded = Mean.of(weight != raw, layout.mask)
        loss = weighted_gradient(weight, tokens, "Reinforce")
        return loss._replace(
            metrics={**ratio_metrics(ratio, layout.mask), "policy/weight_bounded_fraction": bounded}
        )
