"""Penalties on the divergence from a reference policy, estimated at the sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import check_choice, check_number
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import TokenLoss, TokenTerm
from rlobjectives.losses.ratios import LOG_RATIO_CLAMP, token_ratio
from rlobjectives.statistics import Mean
from rlobjectives.tokens import TokenBatch

__all__ = ["KL_ESTIMATORS", "KLPenalty", "kl_estimate"]

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "ratio_k3")


def kl_estimate(log_ratio: Tensor, estimator: str, clamp: float = LOG_RATIO_CLAMP) -> tuple[Tensor, Tensor]:
    """One sample's estimate of ``KL(π ‖ π_ref)`` and its derivative in ``log π``.

    With ``x = log π − log π_ref`` at a token sampled from π:

        k1 = x              slope 1          unbiased; as a loss its expected gradient is 0
        k2 = x²/2           slope x          biased value, the gradient of the reverse KL
        k3 = e⁻ˣ − 1 + x    slope 1 − e⁻ˣ    unbiased and ≥ 0; the gradient of the *forward* KL
        abs = |x|           slope sign x

    Only the exponent is clamped, and its gradient is kept beyond the clamp, so the penalty pulls
    hardest where the drift is worst.

    Args:
        log_ratio: ``log π − log π_ref`` in nats, any shape.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        clamp: Bound on the exponent of k3.

    Returns:
        Value in nats and slope, without gradient.

    Example:
        >>> kl_estimate(torch.tensor([0.0, -1.0]), "k3")[0]
        tensor([0.0000, 0.7183])
    """
    check_choice("estimator", estimator, KL_ESTIMATORS[:-1])
    x = log_ratio.detach()
    if estimator == "k1":
        return x, torch.ones_like(x)
    if estimator == "k2":
        return x.square() / 2, x
    if estimator == "abs":
        return x.abs(), x.sign()
    # expm1 keeps k3 ≥ 0 near 0, where exp(y) − 1 − y cancels to noise of either sign.
    growth = torch.expm1((-x).clamp(-clamp, clamp))
    return growth + x, -growth


@dataclass(frozen=True, slots=True, kw_only=True)
class KLPenalty(TokenTerm):
    """Adds ``coef · KL(π ‖ π_ref)`` to every token's loss.

    The metric ``policy/kl_to_ref`` is Σ KL / Σ tokens over the window whatever the reduction, so it
    compares across objectives.

    Args:
        coef: Weight of the penalty, β ≥ 0.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"abs"`` (see `kl_estimate`), or ``"ratio_k3"``:
            ``ρ·k3`` with the gradient kept in ρ, whose slope is exactly ``ρ·x``: right on and off policy.
        exponent_clamp: Bound on the exponent of k3; the output is never clamped.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        k1, k2, k3: J. Schulman, "Approximating KL divergence", 2020; ρ·k3: DeepSeek-V3.2,
        arXiv:2512.02556. verl, OpenRLHF and ROLL also clamp the output to ±10, which has no gradient left
        once ``x < −2.6``. TRL multiplies by ρ by default.

    Example:
        >>> KLPenalty(coef=0.04).required().needs_ref_logprobs
        True
    """

    capabilities: ClassVar[Capabilities] = Capabilities(needs_ref_logprobs=True)
    metrics: ClassVar[Mapping[str, Metric]] = {
        "policy/kl_to_ref": Metric(Mean, "nats/token", "estimated divergence from the reference policy"),
    }

    coef: float = 0.001
    estimator: Literal["k1", "k2", "k3", "abs", "ratio_k3"] = "k3"
    exponent_clamp: float = LOG_RATIO_CLAMP

    def __post_init__(self) -> None:
        check_number("coef", self.coef, low=0.0)
        check_number("exponent_clamp", self.exponent_clamp, low=0.0, open_low=True)
        check_choice("estimator", self.estimator, KL_ESTIMATORS)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Weighted penalty, its slope, and the unweighted metric."""
        del context
        layout = tokens.layout
        reference = tokens.need("ref_logprobs", "KLPenalty")
        x = layout.select(tokens.logprobs.detach() - reference)
        kl, slope = kl_estimate(x, self.estimator.removeprefix("ratio_"), self.exponent_clamp)
        metric = {"policy/kl_to_ref": Mean.of(kl, layout.mask)}
        if self.estimator == "ratio_k3":
            ratio = token_ratio(tokens)
            kl, slope = ratio.value * kl, ratio.value * (slope + torch.where(ratio.inside, kl, 0.0))
        return TokenLoss(self.coef * kl, self.coef * slope, metric)
