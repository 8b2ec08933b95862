"""VESPO: a smooth weight that fades with the likelihood ratio of the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratio_metrics import RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, base_logprobs, importance_ratio, sequence_sums
from rlobjectives.maths.surrogates import weighted_gradient
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Stat
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["VESPO", "gamma_weight"]

SMALLEST_LOG_WEIGHT = math.log(1e-8)
"""Sequence log-ratios below this are held at it, as in the authors' code."""


def gamma_weight(log_ratio: Tensor, shape: float | Tensor, rate: float | Tensor) -> Tensor:
    """``φ(w) = wᵏ·exp(λ(1 − w))`` for ``w = exp(log_ratio)``, in log space; 1 at w = 1.

    Args:
        log_ratio: ``log w``, held to [ln 1e-8, 20].
        shape: k: how fast the weight falls as w → 0.
        rate: λ: how fast it falls as w → ∞.

    Returns:
        In [0, ∞), without gradient; 0 far out on either side, never NaN for finite input.

    Example:
        >>> gamma_weight(torch.tensor([0.0, 50.0]), torch.tensor(2.0), torch.tensor(3.0))
        tensor([1., 0.])
    """
    held = log_ratio.clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_CLAMP)
    return (rate + shape * held - rate * held.exp()).exp()


@dataclass(frozen=True, kw_only=True)
class VESPO(PolicyLoss):
    """The policy gradient under a smooth, asymmetric weight of the sequence's likelihood ratio.

        log wᵢ = Σₜ clip(ℓₜ − ℓₜᵒˡᵈ, ±20)        Lᵢₜ = −φ(wᵢ)·Aᵢₜ·ℓₜ        φ(w) = wᵏ·exp(λ(1 − w))

    The weight is a constant; the slope is ``−φ(wᵢ)·Aᵢₜ``. The log-ratio is *summed*, not averaged: a long
    sequence leaves the trust region sooner. φ(1) = 1.

    Under context parallelism w is that of the whole sequence (one sum over the ranks).

    Args:
        shape_positive: k where A ≥ 0.
        rate_positive: λ where A ≥ 0.
        shape_negative: k where A < 0.
        rate_negative: λ where A < 0.
        base: What w is taken against: ``"old"``, or ``"behavior"`` for the policy that sampled, which
            folds the sampler's mismatch into the same weight (then do not correct for it a second time).

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        VESPO, arXiv:2602.10693, with the token mean. TRL and Liger turn a non-finite weight into 0; here
        it is an error. TRL truncates the sampler's ratio before folding it in.

    Example:
        >>> [one.column.name for one in VESPO(base="behavior").declared_reads()]
        ['behavior_logprobs']
    """

    straight_through = True
    capabilities: ClassVar[Capabilities] = Capabilities(
        requires_sampled_distribution=True, communicates_in_loss=True
    )
    metrics: ClassVar[Mapping[str, Metric]] = {
        **RATIO_METRICS,
        "policy/sequence_weight": Metric(Mean, "weight", "VESPO's weight of a sequence, over tokens"),
    }

    shape_positive: float = option(2.0, low=0, open_low=True)
    rate_positive: float = option(3.0, low=0, open_low=True)
    shape_negative: float = option(3.0, low=0, open_low=True)
    rate_negative: float = option(2.0, low=0, open_low=True)
    base: Literal["old", "behavior"] = "old"

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities, when the ratio is taken against them."""
        return (read("behavior_logprobs"),) if self.base == "behavior" else ()

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and metrics of each token."""
        layout, mask = tokens.layout, tokens.layout.mask
        ratio = importance_ratio(tokens.logprobs, base_logprobs(tokens, self.base, "VESPO"), layout)
        _, total = sequence_sums(layout, context, ratio.log.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
        rises = layout.select(tokens.need("advantages", "VESPO")) >= 0
        # Both weights are a number a sequence; the advantage's sign picks one at each token.
        positive, negative = (
            layout.expand(gamma_weight(total, shape, rate))
            for shape, rate in (
                (self.shape_positive, self.rate_positive),
                (self.shape_negative, self.rate_negative),
            )
        )
        weight = torch.where(rises, positive, negative)
        found: dict[str, Stat] = {"policy/sequence_weight": Mean.of(weight, mask)}
        loss = weighted_gradient(weight, tokens, "VESPO")
        return loss._replace(metrics={**ratio_metrics(ratio, mask), **found})
