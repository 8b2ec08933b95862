"""M2PO: trust-region bounds that follow from a budget on the second moment of the log-ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.masking import select
from rlobjectives.maths.quantile import histogram_rounds, histograms
from rlobjectives.maths.ratio_metrics import CLIP_METRICS, RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, Ratio, clamp_around, token_ratio
from rlobjectives.maths.second_moment import ROUNDS, Level, level_of, local_level, round_histogram
from rlobjectives.maths.surrogates import clipped_surrogate
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Stat
from rlobjectives.statistics.distributions import Histogram
from rlobjectives.token_parts import Round, TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["M2PO", "harmful"]

_METRICS: Mapping[str, Metric] = {
    "m2po/second_moment_before": Metric(
        Mean, "nats²", "mean squared log-ratio of the tokens that are bounded"
    ),
    "m2po/second_moment_after": Metric(Mean, "nats²", "the same under the bound, before the floors"),
}
_BOUNDS: Mapping[str, Metric] = {
    "m2po/clip_low": Metric(Mean, "ratio", "distance of the lower bound from 1, floor included"),
    "m2po/clip_high": Metric(Mean, "ratio", "distance of the upper bound from 1, floor included"),
}
_MASKED = {"m2po/masked_fraction": Metric(Mean, "fraction", "tokens left out of the loss")}


def harmful(log_ratio: Tensor, advantages: Tensor, layout: TokenLayout) -> Tensor:
    """Counted tokens whose ratio has already moved the way the advantage pushes: ``A·log ρ > 0``.

    Args:
        log_ratio: ``log ρ``, shaped like the mask.
        advantages: A, shaped like the mask.
        layout: Supplies the mask.

    Returns:
        Bool, shaped like the mask.
    """
    same_way = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    return same_way & layout.mask


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyLoss):
    """M2PO: a clipped surrogate whose bounds keep the second moment of the log-ratios within a budget.

        H = {A > 0, ρ > 1} ∪ {A < 0, ρ < 1}      v = (log ρ)²      M₂ = mean_H v
        Lₜ = max(−Aₜρₜ, −Aₜ·clip(ρₜ, min(e^{−τ}, 1 − floor_low), max(e^{τ}, 1 + floor_high)))

    With ``M₂ ≤ budget``, or without harmful tokens, nothing is clipped. Otherwise τ is found from the values
    of H; masked tokens never enter. Fresh data have ρ ≈ 1 everywhere, stale data are clipped no more than
    needed. Log-ratio and τ are held to ±20 before ``exp``, with slope 0 beyond.

    In step scope H, τ and the bounds are those of the whole window. They come from three mergeable
    histograms, so opening the window costs three collectives of 48 kB a rank; a fourth where advantages are
    only final after the first (GDPO).

    Args:
        budget: Bound on M₂, in nats². The paper's scripts use 0.04.
        mode: ``"clip_released"``: τ² is the largest v below the one at which the budget runs out, minus
            1e-12, as in the released code; 0 when there is none. ``"clip_waterfill"``: τ² solves ``Σ_H min(v,
            τ²) = |H|·budget``. ``"mask"``: no clip; of all tokens those with the largest v are dropped until
            the mean of the rest is below budget. Equal values are kept or dropped together, and the smallest
            always stay.
        floor_low: The lower bound is never closer to 1 than this (clip modes); 0 for no floor.
        floor_high: The same for the upper bound.
        scope: ``"step"``: over the window, whatever the cut; needs the window's log-probabilities before the
            first loss. ``"micro_batch"``: each micro-batch by itself, as in every other implementation.
        denominator: ``"original"``: tokens that mask mode drops still count in the reduction's denominators.
            ``"kept"``: the policy loss is reduced as if they had been masked.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        arXiv:2510.01161; the masked form is the paper's, and AReaL's, which takes v between the sampler and
        the old policy. The released solver reports the second moment *before* clipping as the one after when
        τ is 0, and counts masked tokens in some versions.

    Example:
        >>> M2PO().required().needs_prepass, M2PO(scope="micro_batch").required().needs_prepass
        (True, False)
    """

    prepass_rounds: ClassVar[int] = ROUNDS
    prepass_reads_advantages: ClassVar[bool] = True

    budget: float = option(0.01, low=0, open_low=True)
    mode: Literal["clip_released", "clip_waterfill", "mask"] = "clip_released"
    floor_low: float = option(0.3, low=0, high=1)
    floor_high: float = option(0.5, low=0)
    scope: Literal["step", "micro_batch"] = "step"
    denominator: Literal["original", "kept"] = "original"

    @property
    def masks(self) -> bool:
        """Whether tokens are dropped rather than clipped."""
        return self.mode == "mask"

    @property
    def clamp(self) -> float:
        """Bound on the log-ratio before ``exp``, and on τ: 20, or what the floors need."""
        clamp = clamp_around(LOG_RATIO_CLAMP, 1.0 - self.floor_low, 1.0 + self.floor_high)
        assert clamp is not None
        return clamp

    @property
    def shrinks_denominator(self) -> bool:
        """Whether dropped tokens leave the denominators."""
        return self.masks and self.denominator == "kept"

    def required(self) -> Capabilities:
        """Whole micro-batches, and whole sequences, where the bound is of a micro-batch."""
        step = self.scope == "step"
        own = Capabilities(
            requires_sampled_distribution=True, depends_on_cut=not step, supports_context_parallel=step
        )
        return super().required().merge(own)

    def rounds(self) -> tuple[Round, ...]:
        """Histograms of the squares, in step scope."""
        return histogram_rounds(self._histogram) if self.scope == "step" else ()

    def declared_metrics(self) -> Mapping[str, Metric]:
        """Bounds and clip fractions, or the masked fraction."""
        return {**RATIO_METRICS, **_METRICS, **(_MASKED if self.masks else {**_BOUNDS, **CLIP_METRICS})}

    def _histogram(self, turn: int, tokens: TokenBatch, context: WindowContext) -> dict[str, Histogram]:
        ratio, earlier = token_ratio(tokens), histograms(context, turn)
        counted = self._bounded(ratio, tokens)
        found = round_histogram(ratio.log, counted, earlier, budget=self.budget, drop=self.masks)
        return {f"round_{turn}": found}

    def keep(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        """Tokens that stay: all of them in the clip modes."""
        if not self.masks:
            return tokens.layout.mask
        ratio = token_ratio(tokens)
        return self._kept(ratio, self._level(ratio, tokens, context), tokens.layout)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and metrics of each token."""
        ratio, layout = token_ratio(tokens, self.clamp), tokens.layout
        level = self._level(ratio, tokens, context)
        loss = self._masked(ratio, level, tokens) if self.masks else self._clipped(ratio, level, tokens)
        return loss._replace(metrics={**loss.metrics, **ratio_metrics(ratio, layout.mask)})

    def _bounded(self, ratio: Ratio, tokens: TokenBatch) -> Tensor:
        if self.masks:
            return tokens.layout.mask
        return harmful(ratio.log, tokens.need("advantages", "M2PO"), tokens.layout)

    def _level(self, ratio: Ratio, tokens: TokenBatch, context: WindowContext) -> Level:
        if self.scope == "step":
            return level_of(histograms(context), budget=self.budget, drop=self.masks)
        return local_level(ratio.log, self._bounded(ratio, tokens), budget=self.budget, drop=self.masks)

    def _kept(self, ratio: Ratio, level: Level, layout: TokenLayout) -> Tensor:
        return layout.mask & (ratio.log.to(torch.float64).square() <= level.cutoff())

    def _clipped(self, ratio: Ratio, level: Level, tokens: TokenBatch) -> TokenLoss:
        layout = tokens.layout
        square = level.water_level(self.budget) if self.mode == "clip_waterfill" else level.released_level()
        bound = square.sqrt().clamp_max(self.clamp)
        low = (-torch.expm1(-bound)).clamp_min(self.floor_low)
        high = torch.expm1(bound).clamp_min(self.floor_high)
        loss = clipped_surrogate(
            ratio, tokens.need("advantages", "M2PO"), layout, clip_low=low, clip_high=high
        )
        metrics: dict[str, Stat] = {
            **loss.metrics,
            **_moments(level, level.mean_below(square), layout),
            "m2po/clip_low": _everywhere(low, layout),
            "m2po/clip_high": _everywhere(high, layout),
        }
        return loss._replace(metrics=metrics)

    def _masked(self, ratio: Ratio, level: Level, tokens: TokenBatch) -> TokenLoss:
        layout = tokens.layout
        keep = self._kept(ratio, level, layout)
        advantages = layout.select(tokens.need("advantages", "M2PO")).to(ratio.value.dtype)
        value = select(-advantages * ratio.value, keep)
        rest = torch.where(level.below > 0, level.below_total / level.below.clamp_min(1.0), level.value)
        metrics: dict[str, Stat] = {
            **_moments(level, torch.where(level.binding, rest, level.mean()), layout),
            "m2po/masked_fraction": Mean.of(~keep, layout.mask),
        }
        return TokenLoss(value, select(value, ratio.inside), metrics)


def _moments(level: Level, after: Tensor, layout: TokenLayout) -> dict[str, Stat]:
    return {
        "m2po/second_moment_before": _everywhere(level.mean(), layout),
        "m2po/second_moment_after": _everywhere(after, layout),
    }


def _everywhere(number: Tensor, layout: TokenLayout) -> Mean:
    return Mean.of(number.expand(layout.shape), layout.mask)
