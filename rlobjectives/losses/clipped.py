"""PPO's clipped surrogate, symmetric or not, with dual clip and TRL's ratio cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rlobjectives._moved import moved_names
from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import check_number
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.maths.ratio_metrics import CLIP_METRICS, HELD_METRICS, RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, clamp_around, token_ratio
from rlobjectives.maths.surrogates import clipped_surrogate
from rlobjectives.options import option
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["ClippedSurrogate"]


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(PolicyLoss):
    """The clipped surrogate of PPO, token by token.

        ρₜ = exp(ℓₜ − ℓₜᵒˡᵈ)        Lₜ = max(−Aₜρₜ, −Aₜ·clip(ρₜ, 1 − low, 1 + high))

    The slope is ``−Aₜρₜ`` where the unclipped branch rules and 0 where the clipped one does. A zero
    advantage is never "clipped". Beyond ``log_ratio_clamp`` the ratio is constant and its slope is 0.

    Args:
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1; None takes `clip_low`. DAPO uses 0.28.
        dual_clip: Bound c > 1 on the loss of negative advantages, ``−c·A``; off by default (verl: 3).
        ratio_cap: Cap on the ratio in the *unclipped* branch, both signs (TRL's ``delta``,
            INTELLECT-2); off by default. Must exceed ``1 + clip_high``.
        log_ratio_clamp: Bound on the log-ratio before ``exp``; None for none. The default gives way to a bound that lies
            farther out.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        PPO, arXiv:1707.06347; asymmetric bounds: DAPO, arXiv:2503.14476, Eq. 10; dual clip:
        arXiv:1912.09729; ratio cap: arXiv:2505.07291. TRL, slime and AReaL do not clamp the log-ratio.

    Example:
        >>> from rlobjectives import Objective, GRPO
        >>> Objective(estimator=GRPO(), policy_loss=ClippedSurrogate(clip_high=0.28)).policy_loss.clip_high
        0.28
    """

    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    metrics: ClassVar[Mapping[str, Metric]] = {**RATIO_METRICS, **CLIP_METRICS, **HELD_METRICS}
    examples = (
        {"clip_high": 0.28},
        {"dual_clip": 3.0},
        {"ratio_cap": 2.0},
        {"dual_clip": 1.5, "ratio_cap": 1.4, "clip_low": 0.1},
        {"log_ratio_clamp": 5.0},
    )

    clip_low: float = option(0.2, low=0, high=1)
    clip_high: float | None = option(None, low=0)
    dual_clip: float | None = option(None, low=1, open_low=True)
    ratio_cap: float | None = None
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    def check(self) -> None:
        """The cap lies above the clip."""
        if self.ratio_cap is not None:
            check_number("ratio_cap", self.ratio_cap, low=1.0 + self.upper, open_low=True)

    @property
    def upper(self) -> float:
        """Distance of the upper bound from 1."""
        return self.clip_low if self.clip_high is None else self.clip_high

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and ratio metrics of each token."""
        del context
        bounds = (1.0 - self.clip_low, 1.0 + self.upper, self.dual_clip, self.ratio_cap)
        ratio = token_ratio(tokens, clamp_around(self.log_ratio_clamp, *bounds))
        loss = clipped_surrogate(
            ratio,
            tokens.need("advantages", "ClippedSurrogate"),
            tokens.layout,
            clip_low=self.clip_low,
            clip_high=self.upper,
            dual_clip=self.dual_clip,
            ratio_cap=self.ratio_cap,
        )
        return loss._replace(metrics={**loss.metrics, **ratio_metrics(ratio, tokens.layout.mask)})


__getattr__ = moved_names(__name__)
