"""Whitening of advantages over the tokens of the window, for the estimators that offer it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.checks import check_choice, check_number
from rlobjectives.component import WindowContext
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.whitening import WHITEN_MODES, whiten
from rlobjectives.layouts import TokenLayout
from rlobjectives.statistics import Maximum, Minimum, Moments, Stat

__all__ = ["Normalized"]


@dataclass(frozen=True, kw_only=True)
class Normalized(Estimator):
    """An estimator whose advantages can be whitened over all counted tokens of the window.

        Âₜ = (Aₜ − mean_W A) / spread_W A        W: all tokens of one optimizer step, on all ranks

    A window in which every token has the same advantage gives exactly zero. The raw estimate, and the
    value targets made from it, are never touched.

    Args:
        normalize: ``"none"`` or ``"window"``.
        ddof: 1 sample, 0 population variance.
        epsilon: Stability constant: in units of the advantage for ``"add"``, squared units otherwise.
        epsilon_mode: ``"add"`` (std + ε), ``"variance"`` (√(var + ε)) or ``"floor"`` (√max(var, ε)).
    """

    normalize: Literal["none", "window"] = "none"
    ddof: int = 1
    epsilon: float = 1e-8
    epsilon_mode: Literal["add", "variance", "floor"] = "variance"

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, ("none", "window"))
        check_choice("epsilon_mode", self.epsilon_mode, WHITEN_MODES)
        check_number("epsilon", self.epsilon, low=0.0)
        if self.ddof not in (0, 1):
            raise CapabilityError(f"ddof is {self.ddof!r}; expected 1 (sample) or 0 (population).")

    def violations(self, facts: TrainerFacts) -> Iterable[str]:
        """Normalisation done twice."""
        if (
            self.normalize != "none"
            and facts.normalize_advantages
            and not self.required().forbids_normalize_advantages
        ):
            yield 'it whitens advantages itself; turn normalize_advantages off, or set normalize="none".'

    def declared_statistics(self) -> dict[str, type[Stat]]:
        """Moments and range of the advantages over tokens, when they are normalised."""
        if self.normalize == "none":
            return {}
        return {"moments": Moments, "highest": Maximum, "lowest": Minimum}

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Moments and range of one micro-batch's advantages over its counted tokens."""
        if self.normalize == "none":
            return {}
        raw, mask = self._raw(estimate), layout.mask
        if not self.token_level:
            mask = mask & layout.expand(self._counted(estimate))
            raw = layout.expand(raw)
        return {
            "moments": Moments.of(raw, mask),
            "highest": Maximum.of(raw, mask),
            "lowest": Minimum.of(raw, mask),
        }

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Whiten over the window, or give the raw advantages."""
        del layout
        raw = self._raw(estimate)
        if self.normalize == "none":
            return raw
        moments, highest, lowest = (context[name] for name in ("moments", "highest", "lowest"))
        assert isinstance(moments, Moments)
        assert isinstance(highest, Maximum) and isinstance(lowest, Minimum)
        white = whiten(raw, moments, ddof=self.ddof, epsilon=self.epsilon, mode=self.epsilon_mode)
        counted = True if self.token_level else self._counted(estimate)
        return torch.where((highest.value > lowest.value) & counted, white, 0.0)

    def _raw(self, estimate: Tensor) -> Tensor:
        # Of the sequence-level ones, those that offer whitening carry [advantage, scored].
        return estimate if self.token_level else estimate[:, 0]

    def _counted(self, estimate: Tensor) -> Tensor:
        return estimate[:, 1] > 0
