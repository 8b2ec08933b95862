"""Every sequence counts the same: by its mean token, or by the sum of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.reductions.base import LossReduction, inverse

__all__ = ["SequenceMean", "SequenceSum"]

Count = Literal["all", "nonempty"]


def _sequences(context: WindowContext, count: str) -> Tensor:
    return context.sequences if count == "all" else context.nonempty_sequences


@dataclass(frozen=True, kw_only=True)
class SequenceMean(LossReduction):
    """Mean over sequences of the mean over their tokens: ``wₜ = 1 / (N · Tᵢ)``.

    N counts *all* sequences of the window, fully masked ones included (they add 0).

    Args:
        count: ``"all"``, or ``"nonempty"`` to leave fully masked sequences out of N.

    Raises:
        CapabilityError: If ``count`` is anything else.

    Source:
        GRPO, arXiv:2402.03300. verl counts non-empty rows only and adds 1e-8 to Tᵢ; TRL and ROLL count all.

    Example:
        >>> SequenceMean(count="nonempty")
        SequenceMean(count='nonempty')
    """

    averages: ClassVar[bool] = True

    count: Count = "all"

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``1 / (N · Tᵢ)`` for each sequence, with the whole sequence's Tᵢ."""
        return inverse(_sequences(context, self.count)) * inverse(layout.token_counts())


@dataclass(frozen=True, kw_only=True)
class SequenceSum(LossReduction):
    """Mean over sequences of the sum over their tokens: ``wₜ = 1 / N``. Long answers weigh more.

    Args:
        count: ``"all"``, or ``"nonempty"`` to leave fully masked sequences out of N.

    Raises:
        CapabilityError: If ``count`` is anything else.

    Source:
        The classic episodic policy gradient; verl's ``seq-mean-token-sum``.

    Example:
        >>> SequenceSum()
        SequenceSum(count='all')
    """

    count: Count = "all"

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``1 / N`` for every sequence."""
        return inverse(_sequences(context, self.count)).expand(layout.num_sequences)
