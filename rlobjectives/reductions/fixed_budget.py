"""Dr.GRPO's constant divisor: no length enters the weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.options import bounds
from rlobjectives.reductions.base import LossReduction, inverse

__all__ = ["FixedBudget"]


@dataclass(frozen=True, kw_only=True)
class FixedBudget(LossReduction):
    """Sum over tokens, over a fixed budget a sequence: ``wₜ = 1 / (N · B)``.

    The budget is an argument, never the padded width. N counts *all* sequences, fully masked ones
    included.

    Args:
        max_tokens: Budget B: the largest number of tokens a response may have.
        count: ``"all"``, or ``"nonempty"`` to leave fully masked sequences out of N.

    Raises:
        CapabilityError: If the budget is not a positive integer (True and 0 are refused).

    Source:
        Dr.GRPO, arXiv:2503.20783. verl's default divisor is the padded width, ROLL leaves N out, OpenRLHF's
        ``dr_grpo`` changes only the advantage.

    Example:
        >>> FixedBudget(max_tokens=8)
        FixedBudget(max_tokens=8, count='all')
    """

    max_tokens: int = field(metadata=bounds(low=1))
    count: Literal["all", "nonempty"] = "all"

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``1 / (N · B)`` for every sequence."""
        sequences = context.sequences if self.count == "all" else context.nonempty_sequences
        return (inverse(sequences) / self.max_tokens).expand(layout.num_sequences)
