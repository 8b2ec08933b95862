"""DRO: the policy gradient with a quadratic leash on the log-ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlobjectives.columns import Read, read
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratio_metrics import RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import base_logprobs, importance_ratio
from rlobjectives.options import option
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["DRO", "quadratic_leash"]


def quadratic_leash(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, coef: float) -> TokenLoss:
    """``−A·ℓ + β/2·d²`` and its slope ``−A + β·d``.

    Args:
        logprobs: ℓ, the current log-probabilities.
        log_ratio: d, in nats.
        advantages: A.
        coef: β.
    """
    return TokenLoss(coef / 2.0 * log_ratio.square() - advantages * logprobs, coef * log_ratio - advantages)


@dataclass(frozen=True, kw_only=True)
class DRO(PolicyLoss):
    """Policy gradient plus half the squared log-ratio: no ratio is ever exponentiated.

        Lₜ = −(Aₜ·ℓₜ − β/2·(ℓₜ − ℓₜᵒˡᵈ)²)        slope −Aₜ + β·(ℓₜ − ℓₜᵒˡᵈ)

    The loss is smallest where the log-ratio is ``Aₜ/β``, so it has a finite optimum even on samples of
    another policy; there is no importance weight to make it unbiased there.

    Args:
        coef: Strength β > 0 of the leash.
        base: What the log-ratio is taken against: ``"old"`` or ``"behavior"``, the policy that sampled.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        DRO, arXiv:2405.19107; in this token-wise form: verl's ``dro`` and Kimi K1.5, arXiv:2501.12599.

    Example:
        >>> DRO(coef=0.5).coef
        0.5
    """

    metrics: ClassVar[Mapping[str, Metric]] = RATIO_METRICS

    coef: float = option(0.1, low=0, open_low=True)
    base: Literal["old", "behavior"] = "old"

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities, when the leash is tied to them."""
        return (read("behavior_logprobs"),) if self.base == "behavior" else ()

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and ratio metrics of each token."""
        del context
        layout, logprobs = tokens.layout, tokens.logprobs.detach()
        ratio = importance_ratio(logprobs, base_logprobs(tokens, self.base, "DRO"), layout)
        advantages = layout.select(tokens.need("advantages", "DRO")).to(logprobs.dtype)
        loss = quadratic_leash(layout.select(logprobs), ratio.log, advantages, self.coef)
        return loss._replace(metrics=ratio_metrics(ratio, layout.mask))
