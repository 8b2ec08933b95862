"""The reduction: a weight for every sequence or token, defined on the whole window."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.component import Component, WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.statistics import Stat

__all__ = ["LossReduction", "inverse"]


class LossReduction(Component):
    """Says how much each token's loss counts: ``loss = Σ wₜ·ℓₜ`` over the window.

    The weights depend on the window only, so any cut into micro-batches and ranks adds up to the same
    number. Entropy bonus and KL penalty are weighted by the same reduction.

    Attributes:
        token_level: True when `weights` gives one weight per token, else one per sequence.
        follows_mask: True when statistics and weights follow from the layout's mask, so that they can be
            found again for a smaller one.
        averages: Whether the weights of a window add up to 1 where every sequence has a token.
    """

    token_level: ClassVar[bool] = False
    follows_mask: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    def statistics(self, layout: TokenLayout) -> dict[str, Stat]:
        """What `weights` must know beyond the window's counts, from one micro-batch."""
        del layout
        return {}

    @abc.abstractmethod
    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Weight of each of a sequence's tokens.

        Returns:
            ``[n]`` (shaped like the mask when `token_level`), float64, no gradient. 0 where the window counts nothing.
        """


def inverse(count: Tensor) -> Tensor:
    """``1 / count``, and 0 where the count is 0."""
    return torch.where(count > 0, 1.0 / torch.where(count > 0, count, 1.0), 0.0)
