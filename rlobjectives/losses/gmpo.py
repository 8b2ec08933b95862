"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.masking import select
from rlobjectives.maths.ratio_metrics import CLIP_METRICS, RATIO_METRICS, clip_metrics, ratio_metrics
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, Ratio, sequence_ratio, sequence_sums
from rlobjectives.options import option
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["GMPO", "one_sided_log_ratio"]


def one_sided_log_ratio(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The log-ratio, held on the side the advantage pushes to.

        min(d, high) where A > 0        max(d, −low) where A < 0        0 where A = 0

    Args:
        log_ratio: d, in nats.
        advantages: Of the same shape; only the sign is read.
        clip_low: Lower bound −low, in nats.
        clip_high: Upper bound, in nats.

    Returns:
        Held log-ratio, and where a bound holds it. Without gradient.

    Example:
        >>> log_ratio, advantages = torch.tensor([9.0, 9.0]), torch.tensor([1.0, -1.0])
        >>> one_sided_log_ratio(log_ratio, advantages, clip_low=0.4, clip_high=0.4)
        (tensor([0.4000, 9.0000]), tensor([ True, False]))
    """
    held = torch.where(advantages > 0, log_ratio.clamp_max(clip_high), log_ratio.clamp_min(-clip_low))
    held = torch.where(advantages == 0, 0.0, held)
    return held, (held != log_ratio) & (advantages != 0)


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyLoss):
    """Geometric mean of the token ratios, each clipped in log space before the mean.

        sᵢ = exp( Σₜ clip(dₜ) / Tᵢ )        Lᵢₜ = −Aᵢ·sᵢ        dₜ = ℓₜ − ℓₜᵒˡᵈ

    The clip is one-sided: ``min(dₜ, high)`` for A > 0 and ``max(dₜ, −low)`` for A < 0, so a ratio is only
    held where the update pushes it further out. The slope is ``−Aᵢ·sᵢ`` at free tokens and 0 at held ones.
    A reduction with different weights inside a sequence is refused. Where advantages differ inside a
    sequence, Aᵢ is their mean and each token is clipped by its own sign.

    Under context parallelism the mean is over the whole sequence (one sum over the ranks).

    Args:
        clip_low: Lower bound on a log-ratio is ``−clip_low``, in nats.
        clip_high: Upper bound on a log-ratio, in nats; None takes `clip_low`.
        log_ratio_clamp: Bound on the *mean* log-ratio before ``exp``; the slope is 0 beyond.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        GMPO, arXiv:2507.20673 (bounds e^±0.4), with `SequenceMean`. verl divides by T + 1e-8.

    Example:
        >>> GMPO(clip_low=0.1).upper
        0.1
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        requires_sampled_distribution=True, communicates_in_loss=True
    )
    metrics: ClassVar[Mapping[str, Metric]] = {**RATIO_METRICS, **CLIP_METRICS}
    sequence_level: ClassVar[bool] = True

    clip_low: float = option(0.4, low=0)
    clip_high: float | None = option(None, low=0)
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    @property
    def upper(self) -> float:
        """Upper bound on a log-ratio, in nats."""
        return self.clip_low if self.clip_high is None else self.clip_high

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss of each token's sequence, and the derivative of the sequence's summed loss."""
        layout = tokens.layout
        log = layout.select(tokens.logprobs.detach() - tokens.old())
        advantages = layout.select(tokens.need("advantages", "GMPO")).to(log.dtype)
        held, clipped = one_sided_log_ratio(log, advantages, clip_low=self.clip_low, clip_high=self.upper)
        counts, total, pull = sequence_sums(layout, context, held, advantages)
        ratio = sequence_ratio(counts, total, self.log_ratio_clamp)
        value = (-ratio.value * pull / counts.clamp_min(1.0)).to(log.dtype)
        expanded = layout.expand(value)
        live = layout.expand(ratio.inside) & ~clipped & (advantages != 0)
        metrics = {
            **clip_metrics(clipped, advantages, layout.mask),
            **ratio_metrics(Ratio(log, layout.expand(ratio.value.to(log.dtype)), live), layout.mask),
        }
        return TokenLoss(expanded, select(expanded, live), metrics)
