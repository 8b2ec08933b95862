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
from rlobjectives.maths.quantile import ROUNDS, quantile_histogram, window_cutoff, window_quantile
from rlobjectives.options import option
from rlobjectives.statistics import Maximum, Mean, Stat
from rlobjectives.statistics.distributions import Histogram
from rlobjectives.token_parts import TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["EntropyMask"]


@dataclass(frozen=True, kw_only=True)
class EntropyMask(PolicyCorrection):
    """Keeps the tokens of highest entropy in the policy loss and drops the others.

        keepₜ = Hₜ ≥ quantile(H, 1 − fraction)        over all counted tokens of the window

    The quantile is exact for float32 entropies and the same for any cut of the window: three
    histograms, three collectives a step (the first is the window's own). Ties with the threshold are kept. Penalties and the
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

    prepass_rounds: ClassVar[int] = ROUNDS
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
        """Entropies of the whole window before the losses."""
        own = Capabilities(needs_prepass=True, communicates_in_loss=self.shrinks_denominator)
        return super().required().merge(own)

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Single tokens cannot leave a loss that a sequence shares."""
        del facts
        policy = parts.get("policy_loss")
        if isinstance(policy, TokenTerm) and policy.sequence_level:
            yield (
                f"{type(policy).__name__} has one number a sequence, and EntropyMask drops single tokens, so "
                "its slope would be wrong. Choose a loss of single tokens (GSPOToken, ClippedSurrogate)."
            )
        yield from denominator_conflict(self, parts.get("reduction"))

    def declared_statistics(self) -> Mapping[str, type[Stat]]:
        """One histogram a round."""
        return {_round(turn): Histogram for turn in range(ROUNDS)}

    def round_statistics(self, turn: int) -> Mapping[str, type[Stat]]:
        """The histogram of this round."""
        return {_round(turn): Histogram}

    def statistics(self, tokens: TokenBatch, context: WindowContext) -> dict[str, Stat]:
        """Histogram of the entropies that can still be the threshold."""
        entropy = tokens.need("entropy", "EntropyMask")
        earlier = _rounds(context, context.round)
        found = quantile_histogram(entropy, tokens.layout.mask, earlier, 1.0 - self.fraction)
        return {_round(context.round): found}

    def threshold(self, context: WindowContext) -> Tensor:
        """Entropy from which a token is kept, 0-d."""
        return window_quantile(_rounds(context, ROUNDS), 1.0 - self.fraction)

    def token_weights(self, tokens: TokenBatch, context: WindowContext) -> TokenWeights:
        """Weight 1 for what stays."""
        layout, threshold = tokens.layout, self.threshold(context)
        entropy = layout.select(tokens.need("entropy", "EntropyMask").detach())
        cutoff = window_cutoff(_rounds(context, ROUNDS), 1.0 - self.fraction)
        keep = layout.mask & (entropy.float() >= cutoff)
        metrics: dict[str, Stat] = {
            "entropy_mask/threshold": Maximum.of(threshold.expand(layout.shape), layout.mask),
            "entropy_mask/kept_fraction": Mean.of(keep, layout.mask),
        }
        return TokenWeights(torch.ones_like(entropy), keep, metrics)


def _round(turn: int) -> str:
    return f"round_{turn}"


def _rounds(context: WindowContext, count: int) -> list[Histogram]:
    return [context.get(_round(turn), Histogram) for turn in range(count)]
