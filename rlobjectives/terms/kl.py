"""Penalties on the divergence from a reference policy: estimated at the sampled tokens, or exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlobjectives._moved import moved_names
from rlobjectives.columns import Read, read
from rlobjectives.component import Metric, WindowContext
from rlobjectives.errors import CapabilityError
from rlobjectives.masking import select
from rlobjectives.maths.divergences import kl_estimate
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, token_ratio
from rlobjectives.options import option
from rlobjectives.statistics import Mean
from rlobjectives.token_parts import TokenLoss, TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["REFERENCE_METRICS", "KLPenalty", "reference_metrics"]


REFERENCE_METRICS = {
    "policy/kl_to_ref": Metric(Mean, "nats/token", "estimated divergence from the reference policy"),
}


def reference_metrics(tokens: TokenBatch) -> dict[str, Mean]:
    """The divergence from the reference where no penalty reports it: k3, `KLPenalty`'s default, over tokens.

    Args:
        tokens: A micro-batch; without reference log-probabilities there is nothing to report.
    """
    if tokens.ref_logprobs is None:
        return {}
    layout = tokens.layout
    kl, _ = kl_estimate(layout.select(tokens.logprobs.detach() - tokens.ref_logprobs), "k3")
    return {"policy/kl_to_ref": Mean.of(kl, layout.mask)}


@dataclass(frozen=True, kw_only=True)
class KLPenalty(TokenTerm):
    """Adds ``coef · KL(π ‖ π_ref)`` to every token's loss.

    The metric ``policy/kl_to_ref`` is Σ KL / Σ tokens over the window whatever the reduction, so it
    compares across objectives. A coefficient that follows a target is `AdaptiveCoefficient`.

    Args:
        coef: Weight of the penalty, β ≥ 0.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"abs"``, or straight-through ``"k1+"``, ``"k3+"`` (see
            `kl_estimate`); ``"ratio_k3"``: ``ρ·k3`` with the gradient kept in ρ, whose slope is exactly
            ``ρ·x``: right on and off policy; ``"full"``: the exact divergence over the vocabulary, read
            from `TokenBatch.ref_kl` with its own gradient.
        exponent_clamp: Bound on the exponent of k3.
        output_clamp: Bound on the absolute estimate, for parity only: nothing pulls back beyond it.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        k1, k2, k3: J. Schulman, "Approximating KL divergence", 2020; ρ·k3: DeepSeek-V3.2,
        arXiv:2512.02556, and TRL's default; k1+, k3+: verl. ``output_clamp=10`` with k3 is the
        ``low_var_kl`` of verl, slime and Relax, and OpenRLHF and AReaL clamp every estimator so: no
        gradient is left once ``x < −2.6``.

    Example:
        >>> KLPenalty(coef=0.04).declared_reads()[0].column.name
        'ref_logprobs'
    """

    metrics: ClassVar[Mapping[str, Metric]] = REFERENCE_METRICS
    examples = ({"coef": 0.5, "exponent_clamp": 3.0},)

    coef: float = option(0.001, low=0)
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "ratio_k3", "full"] = "k3"
    exponent_clamp: float = option(LOG_RATIO_CLAMP, low=0, open_low=True)
    output_clamp: float | None = option(None, low=0, open_low=True)

    def check(self) -> None:
        """No clamp where it would cost the exact gradient."""
        if self.output_clamp is not None and self.estimator in ("ratio_k3", "full"):
            raise CapabilityError(
                f"output_clamp is {self.output_clamp!r}, but {self.estimator!r} has the exact gradient, "
                "and would lose it where the divergence is largest. Leave output_clamp out."
            )

    @property
    def straight_through(self) -> bool:
        """With k1+ and k3+."""
        return self.estimator.endswith("+")

    def declared_reads(self) -> tuple[Read, ...]:
        """The reference's log-probabilities, unless the whole divergence comes with the tokens."""
        return (read("ref_kl" if self.estimator == "full" else "ref_logprobs"),)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Weighted penalty, its slope, and the unweighted metric."""
        del context
        layout = tokens.layout
        if self.estimator == "full":
            kl = layout.select(tokens.need("ref_kl", "KLPenalty(estimator='full')"))
            metric = {"policy/kl_to_ref": Mean.of(kl, layout.mask)}
            zero = torch.zeros_like(tokens.logprobs)
            return TokenLoss(self.coef * kl, zero, metric, {"ref_kl": torch.full_like(zero, self.coef)})
        reference = tokens.need("ref_logprobs", "KLPenalty")
        x = layout.select(tokens.logprobs.detach() - reference)
        name = self.estimator.removeprefix("ratio_")
        kl, slope = kl_estimate(x, name, self.exponent_clamp, self.output_clamp)
        metric = {"policy/kl_to_ref": Mean.of(kl, layout.mask)}
        if self.estimator == "ratio_k3":
            ratio = token_ratio(tokens)
            kl, slope = ratio.value * kl, ratio.value * (slope + select(kl, ratio.inside))
        return TokenLoss(self.coef * kl, self.coef * slope, metric)


__getattr__ = moved_names(__name__)
