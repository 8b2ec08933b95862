"""How far the trainer's old policy is from the policy that sampled: log-weights and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.component import Metric, WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.masking import select
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP
from rlobjectives.statistics import Mean, Stat
from rlobjectives.statistics.distributions import EffectiveSize
from rlobjectives.tokens import TokenBatch

__all__ = ["MISMATCH_METRICS", "Mismatch", "mismatch_metrics"]

MISMATCH_METRICS: Mapping[str, Metric] = {
    "mismatch/kl": Metric(Mean, "nats/token", "k1 estimate of KL(sampler ‖ old policy)"),
    "mismatch/k3": Metric(Mean, "nats/token", "k3 estimate of the same"),
    "mismatch/chi2_token": Metric(Mean, "1", "χ² divergence of tokens, E[w²] − 1"),
    "mismatch/chi2_sequence": Metric(
        Mean, "1", "χ² divergence of sequences, with the product of a sequence's weights"
    ),
    "mismatch/ess": Metric(
        EffectiveSize, "fraction", "normalised effective sample size of the token weights"
    ),
    "mismatch/logprob_abs_diff": Metric(Mean, "nats/token", "absolute difference of log-probabilities"),
    "mismatch/prob_abs_diff": Metric(Mean, "probability", "absolute difference of probabilities"),
    "mismatch/perplexity_ratio": Metric(
        Mean, "ratio", "a sequence's perplexity under the old policy over that under the sampler"
    ),
}
"""All on the mask before any token is dropped."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Log-weights ``ℓᵒˡᵈ − ℓᵇ`` of one micro-batch, with sums over whole sequences.

    Attributes:
        log: Float64, shaped like the mask; 0 where the token does not count or the sampler is unknown.
        known: Bool; counted tokens at which the sampler is known.
        layout: Where the sequences are.
        context: Supplies the sum over context-parallel ranks.
        counts: Known tokens of each whole sequence, at least 1.
    """

    log: Tensor
    known: Tensor
    layout: TokenLayout
    context: WindowContext
    counts: Tensor

    @classmethod
    def of(cls, tokens: TokenBatch, context: WindowContext) -> Mismatch:
        """Log-weights of a micro-batch."""
        layout = tokens.layout
        behavior = tokens.need("behavior_logprobs", "ImportanceCorrection")
        flags = tokens.known("behavior_logprobs")
        known = layout.mask if flags is None else layout.mask & flags
        log = select(tokens.old().to(torch.float64) - behavior.to(torch.float64), known)
        counts = context.context_sum(layout.segment_sum(known.to(torch.float64)))
        return cls(log, known, layout, context, counts.clamp_min(1.0))

    def sum(self, per_token: Tensor) -> Tensor:
        """Sum over the known tokens of each whole sequence, ``[n]``."""
        return self.context.context_sum(self.layout.segment_sum(select(per_token, self.known)))

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Each token the number of its sequence."""
        return self.layout.expand(per_sequence)


def mismatch_metrics(mismatch: Mismatch, tokens: TokenBatch) -> dict[str, Stat]:
    """The metrics of `MISMATCH_METRICS` for one micro-batch.

    Args:
        mismatch: Its log-weights.
        tokens: Its columns.
    """
    log, known, layout = mismatch.log, mismatch.known, mismatch.layout
    held = log.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    total = mismatch.sum(log)
    # A sequence counts once: each context-parallel rank counts the share of its tokens that it holds.
    share = layout.segment_sum(known.to(torch.float64)) / mismatch.counts
    behavior = select(tokens.need("behavior_logprobs", "mismatch metrics"), known)
    apart = tokens.old().double().exp() - behavior.double().exp()
    growth = (2.0 * total.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).exp()
    return {
        "mismatch/kl": Mean.of(-log, known),
        "mismatch/k3": Mean.of(torch.expm1(held) - held, known),
        "mismatch/chi2_token": Mean.of((2.0 * held).exp() - 1.0, known),
        "mismatch/chi2_sequence": _weighted(growth - 1.0, share),
        "mismatch/ess": EffectiveSize.of(log, known),
        "mismatch/logprob_abs_diff": Mean.of(log.abs(), known),
        "mismatch/prob_abs_diff": Mean.of(apart.abs(), known),
        "mismatch/perplexity_ratio": _weighted((-total / mismatch.counts).clamp_max(700.0).exp(), share),
    }


def _weighted(values: Tensor, weights: Tensor) -> Mean:
    return Mean(torch.stack([(values * weights).sum(), weights.sum()]))
