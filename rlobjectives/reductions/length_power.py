"""ΔL normalisation: the unbiased mean over sequences whose gradient varies least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.options import option
from rlobjectives.reductions.base import LossReduction, inverse
from rlobjectives.statistics import Stat, Sum

__all__ = ["LengthPower"]


@dataclass(frozen=True, kw_only=True)
class LengthPower(LossReduction):
    """Mean over sequences of their summed token losses, weighted by a negative power of their length.

        wᵢ = (1/M) · Tᵢ^−α / Σⱼ Tⱼ^−α        over the window

    A sequence's summed gradient has a variance in proportion to its length. Among all weights that add up to
    1, and so leave its mean alone, α = 1 gives the smallest variance; α = 0 is `SequenceSum`. In between,
    long answers keep more of a say. A sequence without counted tokens has weight 0.

    Args:
        power: α in [0, 1].
        max_tokens: M, a constant divisor that sets the scale of the loss; 1 leaves the mean of sums, a
            response budget makes it comparable with `FixedBudget`.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        ΔL normalisation (later "VL Norm"), arXiv:2509.07558. `SequenceMean` and `TokenMean` weigh by length
        too, but their weights do not add up to a constant: the gradient shrinks as answers grow.

    Example:
        >>> from rlobjectives import GRPO, Objective, PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, False], [True, True]]))
        >>> window = Objective(estimator=GRPO(), reduction=LengthPower(power=1.0)).freeze(
        ...     [(torch.zeros(2), layout)]
        ... )
        >>> window.weights(layout)[:, 0]
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """

    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {"powers": Sum}

    power: float = option(1.0, low=0, high=1)
    max_tokens: int = option(1, low=1)

    def statistics(self, layout: TokenLayout) -> dict[str, Stat]:
        """``Σ T^−α`` over the sequences that this rank counts."""
        return {"powers": Sum.of(self._powers(layout), layout.sequence_mask())}

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``T^−α / (M·Σ T^−α)`` for each sequence."""
        return self._powers(layout) * inverse(context.get("powers", Sum).value) / self.max_tokens

    def _powers(self, layout: TokenLayout) -> Tensor:
        lengths = layout.token_counts()
        return torch.where(lengths > 0, lengths.clamp_min(1.0).pow(-self.power), 0.0)
