"""Penalties on the divergence from a reference policy: estimated at the sampled tokens, or exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.checks import check_choice
from rlobjectives.component import Metric, WindowContext
from rlobjectives.errors import CapabilityError
from rlobjectives.losses.base import TokenLoss, TokenTerm
from rlobjectives.losses.ratios import LOG_RATIO_CLAMP, clamp_around, token_ratio
from rlobjectives.masking import select
from rlobjectives.options import option
from rlobjectives.statistics import Mean
from rlobjectives.tokens import TokenBatch

__all__ = ["KL_ESTIMATORS", "REFERENCE_METRICS", "KLPenalty", "kl_estimate", "reference_metrics"]

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "ratio_k3", "full")


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


def kl_estimate(
    log_ratio: Tensor, estimator: str, clamp: float = LOG_RATIO_CLAMP, output_clamp: float | None = None
) -> tuple[Tensor, Tensor]:
    """One sample's estimate of ``KL(π ‖ π_ref)`` and its derivative in ``log π``.

    With ``x = log π − log π_ref`` at a token sampled from π:

        k1 = x              slope 1          unbiased; as a loss its expected gradient is 0
        k2 = x²/2           slope x          biased value, the gradient of the reverse KL
        k3 = e⁻ˣ − 1 + x    slope 1 − e⁻ˣ    unbiased and ≥ 0; the gradient of the *forward* KL
        abs = |x|           slope sign x
        k1+, k3+            slope x          the value of k1 or k3, the gradient of k2

    Only the exponent is clamped, and its gradient is kept beyond the clamp, so the penalty pulls
    hardest where the drift is worst.

    Args:
        log_ratio: ``log π − log π_ref`` in nats, any shape.
        estimator: One of the above.
        clamp: Bound on the exponent of k3. The default gives way to an ``output_clamp`` beyond it.
        output_clamp: Bound on the absolute value. Beyond it the slope is 0 (a straight-through slope is not).

    Returns:
        Value in nats and slope, without gradient.

    Example:
        >>> kl_estimate(torch.tensor([0.0, -1.0]), "k3")[0]
        tensor([0.0000, 0.7183])
    """
    check_choice("estimator", estimator, KL_ESTIMATORS[:-1])
    x = log_ratio.detach()
    base = estimator.removesuffix("+")
    if base == "k1":
        value, slope = x, torch.ones_like(x)
    elif base == "k2":
        value, slope = x.square() / 2, x
    elif base == "abs":
        value, slope = x.abs(), x.sign()
    else:
        exponent = clamp_around(clamp, output_clamp)
        assert exponent is not None
        # expm1 keeps k3 ≥ 0 near 0, where exp(y) − 1 − y cancels to noise of either sign.
        growth = torch.expm1((-x).clamp(-exponent, exponent))
        value, slope = growth + x, -growth
    if output_clamp is not None:
        slope = select(slope, value.abs() <= output_clamp)
        value = value.clamp(-output_clamp, output_clamp)
    return value, x if estimator.endswith("+") else slope


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
        >>> KLPenalty(coef=0.04).required().needs_ref_logprobs
        True
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

    def required(self) -> Capabilities:
        """The reference's log-probabilities, unless the whole divergence comes with the tokens."""
        return Capabilities(needs_ref_logprobs=self.estimator != "full")

    def violations(self, facts: TrainerFacts) -> Iterable[str]:
        """The exact divergence needs the reference's logits."""
        if self.estimator == "full" and facts.has_reference is False:
            yield (
                "it needs the reference policy's logits for the exact divergence; the trainer has none. Keep "
                "a frozen reference, or choose an objective without."
            )

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
