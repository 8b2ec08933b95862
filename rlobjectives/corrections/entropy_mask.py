"""Train on the uncertain tokens only: those in the upper part of the window's entropies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.corrections.base import PolicyCorrection, TokenWeights, denominator_conflict
from rlobjectives.maths.quantile import histograms, quantile_rounds, window_cutoff, window_quantile
from rlobjectives.options import option
from rlobjectives.statistics import Maximum, Mean, Stat
from rlobjectives.token_parts import Round, TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["EntropyMask"]


@dataclass(frozen=True, kw_only=True)
class EntropyMask(PolicyCorrection):
    """Keeps the tokens of highest entropy in the policy loss and drops the others.

        keepₜ = Hₜ ≥ quantile(H, 1 − fraction)        over all counted tokens of the window

    The quantile is exact for float32 entropies and the same for any cut of the window: three
    histograms, three collectives per step (the first is the window's own). Ties with the threshold are kept. Penalties and the
    entropy bonus still see every token.

    Args:
        fraction: Share of tokens to keep, in (0, 1].
        denominator: ``"original"``: dropped tokens still count in the reduction's denominators, so the loss
            shrinks with `fraction`. ``"kept"``: the policy loss is reduced as if they had been masked.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        "Beyond the 80/20 rule", arXiv:2506.01939 (fraction 0.2). TRL's ``top_entropy_quantile`` takes the
        quantile of the micro-batch over ranks, keeps the original denominators, and masks the entropy bonus
        too.

    Example:
        >>> EntropyMask(fraction=0.2).required().needs_prepass
        True
    """

    token_level: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, Metric]] = {
        "entropy_mask/threshold": Metric(Maximum, "nats", "entropy from which tokens are kept"),
        "entropy_mask/kept_fraction": Metric(Mean, "fraction", "tokens kept in the policy loss"),
    }

    reads = ("entropy",)

    fraction: float = option(0.2, low=0, high=1, open_low=True)
    denominator: Literal["original", "kept"] = "original"

    @property
    def shrinks_denominator(self) -> bool:
        """Whether dropped tokens leave the denominators."""
        return self.denominator == "kept"

    def required(self) -> Capabilities:
        """An exchange inside the loss, where dropped tokens leave the denominators."""
        return super().required().merge(Capabilities(communicates_in_loss=self.shrinks_denominator))

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Single tokens cannot leave a loss that a sequence shares."""
        del facts
        policy = parts.get("policy_loss")
        if isinstance(policy, TokenTerm) and policy.sequence_level:
            yield (
                f"{type(policy).__name__} has one number per sequence, and EntropyMask drops single tokens, so "
                "its slope would be wrong. Choose a loss of single tokens (GSPOToken, ClippedSurrogate)."
            )
        yield from denominator_conflict(self, parts.get("reduction"))

    def rounds(self) -> tuple[Round, ...]:
        """Histograms of the entropies that can still be the threshold."""
        return quantile_rounds(lambda tokens, _: tokens.need("entropy", self), 1.0 - self.fraction)

    def threshold(self, context: WindowContext) -> Tensor:
        """Entropy from which a token is kept, 0-d."""
        return window_quantile(histograms(context), 1.0 - self.fraction)

    def token_weights(self, tokens: TokenBatch, context: WindowContext) -> TokenWeights:
        """Weight 1 for what stays."""
        layout, threshold = tokens.layout, self.threshold(context)
        entropy = layout.select(tokens.need("entropy", self).detach())
        cutoff = window_cutoff(histograms(context), 1.0 - self.fraction)
        keep = layout.mask & (entropy.float() >= cutoff)
        metrics: dict[str, Stat] = {
            "entropy_mask/threshold": Maximum.of(threshold.expand(layout.shape), layout.mask),
            "entropy_mask/kept_fraction": Mean.of(keep, layout.mask),
        }
        return TokenWeights(torch.ones_like(entropy), keep, metrics)
