"""CISPO: a bounded importance weight on the plain policy gradient, so that no token loses its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratio_metrics import RATIO_METRICS, WEIGHT_METRICS, ratio_metrics
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, clamp_around, token_ratio
from rlobjectives.maths.surrogates import weighted_gradient
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Stat
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["CISPO", "bounded_weight"]


def bounded_weight(
    ratio: Tensor,
    advantages: Tensor,
    *,
    bounds: str,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Tensor:
    """The constant that weighs each token's policy gradient.

        two_sided   clip(ρ, 1 − low, 1 + high)
        upper       min(ρ, cap)
        sign        min(ρ, 1 + high) where A ≥ 0, max(ρ, 1 − low) where A < 0

    Args:
        ratio: Importance ratio ρ.
        advantages: Of the same shape; only their sign is read, and only by ``"sign"``.
        bounds: Which of the three.
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.
        ratio_cap: The bound itself, for ``"upper"``.

    Returns:
        Of the same shape, without gradient.

    Example:
        >>> ratio, advantages = torch.tensor([0.5, 3.0]), torch.tensor([1.0, -1.0])
        >>> bounded_weight(ratio, advantages, bounds="sign", clip_low=0.2, clip_high=0.2, ratio_cap=5.0)
        tensor([0.5000, 3.0000])
    """
    if bounds == "upper":
        return ratio.clamp_max(ratio_cap)
    if bounds == "two_sided":
        return ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.where(advantages < 0, ratio.clamp_min(1.0 - clip_low), ratio.clamp_max(1.0 + clip_high))


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """Clipped importance-sampling weights: the bound acts on a constant, and every token keeps its gradient.

        Lₜ = −ŵₜ·Aₜ·ℓₜ        ŵₜ = clip(ρₜ, 1 − low, 1 + high), without gradient

    Three different bounds go by this name; see `bounded_weight`. The value is not comparable with PPO's:
    only its slope ``−ŵₜ·Aₜ`` matters.

    Args:
        bounds: ``"two_sided"``; ``"upper"``, which holds the weight at `ratio_cap`; or ``"sign"``, which
            bounds a positive advantage from above and a negative one from below (and leaves its other
            side free: a large ratio with A < 0 is not held).
        clip_low: Distance of the lower bound from 1, in [0, 1]; 1 leaves the weight free from below.
        clip_high: Distance of the upper bound from 1.
        ratio_cap: The upper bound itself, read by ``"upper"`` only.
        log_ratio_clamp: Bound on the log-ratio before ``exp``; the slope stays alive beyond it. The default gives
            way to a bound that lies farther out (`clamp_around`).

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        MiniMax-M1, arXiv:2506.13585, Eq. 4-5 (upper bound tuned, lower one left free). verl, slime, NeMo and
        SkyRL bound both sides; TRL and Liger are ``"upper"`` with TRL's ``epsilon_high`` as `ratio_cap`
        (ScaleRL, arXiv:2510.13786: 5). torchrl's loss of this name has the gradient in the ratio and none
        where it clips: that is PPO without the minimum.

    Example:
        >>> CISPO(bounds="upper", ratio_cap=5.0).bounds
        'upper'
    """

    straight_through = True
    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    metrics: ClassVar[Mapping[str, Metric]] = {**RATIO_METRICS, **WEIGHT_METRICS}

    bounds: Literal["two_sided", "upper", "sign"] = "two_sided"
    clip_low: float = option(1.0, low=0, high=1)
    clip_high: float = option(10.0, low=0)
    ratio_cap: float = option(5.0, low=0, open_low=True)
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and ratio metrics of each token."""
        del context
        layout = tokens.layout
        bounds = (self.ratio_cap,) if self.bounds == "upper" else (1.0 - self.clip_low, 1.0 + self.clip_high)
        ratio = token_ratio(tokens, clamp_around(self.log_ratio_clamp, *bounds))
        weight = bounded_weight(
            ratio.value,
            layout.select(tokens.need("advantages", "CISPO")),
            bounds=self.bounds,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
        )
        held: dict[str, Stat] = {
            "policy/weight_bounded_fraction": Mean.of(weight != ratio.value, layout.mask)
        }
        loss = weighted_gradient(weight, tokens, "CISPO")
        return loss._replace(metrics={**ratio_metrics(ratio, layout.mask), **held})
