"""Every token counts the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.reductions.base import LossReduction, inverse

__all__ = ["TokenMean"]


@dataclass(frozen=True, kw_only=True)
class TokenMean(LossReduction):
    """Mean over all counted tokens of the window: ``wₜ = 1 / T``.

    Source:
        DAPO, arXiv:2503.14476. TRL's ``bnpo`` divides by the micro-batch's tokens and its ``dapo`` by the
        generation batch's, which differ from the window's when accumulation does; OpenRLHF averages
        micro-batch means.

    Example:
        >>> import torch
        >>> from rlobjectives import GRPO, Objective, PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True, True], [True, False, False]]))
        >>> window = Objective(estimator=GRPO()).freeze([(torch.zeros(2), layout)])
        >>> window.weights(layout)[0, 0]
        tensor(0.2500, dtype=torch.float64)
    """

    averages: ClassVar[bool] = True

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``1 / T`` for every sequence."""
        return inverse(context.tokens).expand(layout.num_sequences)
