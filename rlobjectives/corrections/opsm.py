"""OPSM: leave out whole sequences that the policy has drifted away from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.columns import Read, read
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.corrections.base import PolicyCorrection, TokenWeights, denominator_conflict
from rlobjectives.statistics import Mean, Stat
from rlobjectives.token_parts import TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["OPSM"]


@dataclass(frozen=True, kw_only=True)
class OPSM(PolicyCorrection):
    """Off-policy sequence mask: leaves what is pushed down out of sequences that have drifted.

        dropₜ = Aₜ < 0  and  meanₛ(ℓₛᵒˡᵈ − ℓₛ) > threshold        over the sequence of t

    A sequence that the policy already makes much less likely teaches nothing more by being pushed down
    further. The test is strict, and looks at each token's own advantage; where all advantages of a sequence
    are equal it drops whole sequences.

    Args:
        threshold: Mean log-ratio δ above which a sequence has drifted, in nats per token.
        against: ``"old"``: the policy that started this round of updates. ``"behavior"``: the one that
            sampled.
        denominator: ``"original"``: dropped tokens still count in the reduction's denominators. ``"kept"``:
            the policy loss is reduced as if they had been masked.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        DeepSeek-V3.2, arXiv:2512.02556, Eq. 9. slime and Relax take the old policy's log-probabilities, TRL
        the sampler's; a NaN is dropped there, and is an error here.

    Example:
        >>> OPSM(threshold=0.1).token_level
        True
    """

    metrics: ClassVar[Mapping[str, Metric]] = {
        "opsm/dropped_fraction": Metric(Mean, "fraction", "tokens dropped by the off-policy sequence mask"),
    }
    prepass_reads_advantages: ClassVar[bool] = True
    token_level: ClassVar[bool] = True

    threshold: float = 0.1
    against: Literal["old", "behavior"] = "old"
    denominator: Literal["original", "kept"] = "original"

    @property
    def shrinks_denominator(self) -> bool:
        """Whether dropped tokens leave the denominators."""
        return self.denominator == "kept"

    def required(self) -> Capabilities:
        """Whole sequences; the window's log-probabilities first where denominators depend on them."""
        return super().required().merge(Capabilities(communicates_in_loss=True))

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities, when the drift is from them."""
        return (read("behavior_logprobs"),) if self.against == "behavior" else ()

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Denominators that cannot shrink, and single tokens dropped from a sequence-level loss."""
        del facts
        estimator, policy = parts.get("estimator"), parts.get("policy_loss")
        if (
            isinstance(policy, TokenTerm)
            and policy.sequence_level
            and getattr(estimator, "token_level", False)
        ):
            yield (
                f"{type(policy).__name__} has one number per sequence, and with token-level advantages OPSM "
                "drops single tokens. Use an estimator with one advantage per sequence."
            )
        yield from denominator_conflict(self, parts.get("reduction"))

    def token_weights(self, tokens: TokenBatch, context: WindowContext) -> TokenWeights:
        """Weight 1 for what stays."""
        layout = tokens.layout
        other = tokens.need("behavior_logprobs", "OPSM") if self.against == "behavior" else tokens.old()
        drift = layout.select((other - tokens.logprobs.detach()).to(torch.float64))
        sums = torch.stack([layout.segment_sum(drift), layout.local_counts()])
        total, count = context.context_sum(sums)
        drifted = layout.expand(total / count.clamp_min(1.0)) > self.threshold
        negative = layout.select(tokens.need("advantages", "OPSM")) < 0
        keep = layout.mask & ~(negative & drifted)
        metrics: dict[str, Stat] = {"opsm/dropped_fraction": Mean.of(~keep, layout.mask)}
        return TokenWeights(torch.ones_like(drift), keep, metrics)
