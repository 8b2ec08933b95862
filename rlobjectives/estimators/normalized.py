"""Whitening of advantages over the tokens of the window, for the estimators that offer it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.component import Component, WindowContext
from rlobjectives.estimators.base import Estimator
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.whitening import differs, whiten
from rlobjectives.options import option
from rlobjectives.statistics import Maximum, Minimum, Moments, Stat

__all__ = ["Normalized"]


@dataclass(frozen=True, kw_only=True)
class Normalized(Estimator):
    """An estimator whose advantages can be whitened over all counted tokens of the window.

        Âₜ = (Aₜ − mean_W A) / spread_W A        W: all tokens of one optimizer step, on all ranks

    A window in which every token has the same advantage, rounding aside, gives exactly zero. The raw estimate, and the
    value targets made from it, are never touched.

    Args:
        normalize: ``"none"`` or ``"window"``.
        ddof: 1 sample, 0 population variance.
        epsilon: Stability constant: in units of the advantage for ``"add"``, squared units otherwise.
        epsilon_mode: ``"add"`` (std + ε), ``"variance"`` (√(var + ε)) or ``"floor"`` (√max(var, ε)).

    Attributes:
        sums_rewards: Of one that gives an advantage a token: whether nothing but a sum of rewards may tell its tokens
            apart. Then its estimate has a second column where it added several up: how far rounding may have moved each.
    """

    sums_rewards: ClassVar[bool] = False

    normalize: Literal["none", "window"] = "none"
    ddof: Literal[0, 1] = 1
    epsilon: float = option(1e-8, low=0)
    epsilon_mode: Literal["add", "variance", "floor"] = "variance"

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Normalisation done twice."""
        yield from super().conflicts(parts, facts)
        if (
            self.normalize != "none"
            and facts.normalize_advantages
            and not self.required().forbids_normalize_advantages
        ):
            yield 'it whitens advantages itself; turn normalize_advantages off, or set normalize="none".'

    @property
    def compares_window(self) -> bool:
        """Whether sequences are whitened that have one advantage each."""
        return self.normalize == "window" and not self.token_level

    def few_samples(self, context: WindowContext) -> Tensor | None:
        """Whether there are fewer than two tokens to whiten, or all of them are one sequence with one advantage."""
        if self.normalize == "none":
            return None
        few = context["moments"].weight < 2
        return few | ((context.sequences < 2) & ~differs(context)) if self.compares_window else few

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """Beside the advantage, where sums of rewards are whitened, what rounding may have done to it."""
        return ("advantage", "rounding") if self.sums_rewards and self.normalize == "window" else ()

    def declared_statistics(self) -> dict[str, type[Stat]]:
        """Moments and range of the advantages over tokens, when they are normalised."""
        if self.normalize == "none":
            return {}
        found: dict[str, type[Stat]] = {"moments": Moments, "highest": Maximum, "lowest": Minimum}
        return {**found, "rounding": Maximum} if self.sums_rewards else found

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Moments and range of one micro-batch's advantages over its counted tokens."""
        if self.normalize == "none":
            return {}
        raw, mask = self._raw(estimate, layout), layout.mask
        if not self.token_level:
            mask = mask & layout.expand(self._counted(estimate))
            raw = layout.expand(raw)
        found: dict[str, Stat] = {
            "moments": Moments.of(raw, mask),
            "highest": Maximum.of(raw, mask),
            "lowest": Minimum.of(raw, mask),
        }
        if self.sums_rewards:
            rounding = torch.zeros_like(raw) if raw is estimate else self.column(estimate, "rounding")
            found["rounding"] = Maximum.of(rounding, mask)
        return found

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Whiten over the window, or give the raw advantages."""
        raw = self._raw(estimate, layout)
        if self.normalize == "none":
            return raw
        moments = context.get("moments", Moments)
        white = whiten(raw, moments, ddof=self.ddof, epsilon=self.epsilon, mode=self.epsilon_mode)
        counted = True if self.token_level else self._counted(estimate)
        return torch.where(differs(context) & counted, white, 0.0)

    def _with_rounding(self, advantages: Tensor, rounding: Tensor | None, layout: TokenLayout) -> Tensor:
        """The estimate: alone, or beside what rounding may have done to each sequence's sum of several rewards."""
        if rounding is None or self.normalize == "none":
            return advantages
        beside = layout.select(layout.expand(rounding.squeeze(1)).to(advantages.dtype))
        return torch.stack([advantages, beside], dim=-1)

    def _raw(self, estimate: Tensor, layout: TokenLayout) -> Tensor:
        # Of the sequence-level ones, those that offer whitening carry [advantage, scored].
        plain = self.token_level and estimate.dim() == layout.mask.dim()
        return estimate if plain else estimate[..., 0]

    def _counted(self, estimate: Tensor) -> Tensor:
        return self.column(estimate, "scored") > 0
