"""The policy loss: one number per token and its slope."""

from __future__ import annotations

from torch import Tensor

from rlobjectives._moved import moved_names
from rlobjectives.token_parts import TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["PolicyLoss"]


class PolicyLoss(TokenTerm):
    """The main loss of an objective: the one that turns advantages into a gradient."""

    def _taught_by(self, tokens: TokenBatch, value: Tensor) -> Tensor:
        """The advantages: a loss of 0 may still have a slope."""
        return value.detach() if tokens.advantages is None else tokens.advantages


__getattr__ = moved_names(__name__)
