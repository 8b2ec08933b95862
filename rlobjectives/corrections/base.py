"""What may stand between a policy loss and its reduction: a weight for every token, without gradient."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from rlobjectives.component import Component, WindowContext
from rlobjectives.reductions.base import LossReduction
from rlobjectives.statistics import Stat
from rlobjectives.token_parts import TokenPart
from rlobjectives.tokens import TokenBatch

__all__ = ["PolicyCorrection", "TokenWeights", "denominator_conflict"]


class TokenWeights(NamedTuple):
    """What a correction says about every token; nothing here carries gradient.

    Attributes:
        weight: Factor on the policy loss, value and slope, shaped like the mask.
        keep: Bool, shaped like the mask: False drops the token from the policy loss.
        metrics: Statistics to report, by the names the part declares.
    """

    weight: Tensor
    keep: Tensor
    metrics: Mapping[str, Stat] = {}


class PolicyCorrection(TokenPart):
    """Weights or drops tokens of the policy loss; penalties and the entropy bonus are left alone.

    A dropped token adds nothing, and stays in the reduction's denominators unless
    `shrinks_denominator` says otherwise: then the policy loss is reduced as if the token had been masked
    from the start.

    Example:
        Half the weight where the sampler was surprised by its own token::

        >>> from dataclasses import dataclass
        >>> import torch
        >>> from rlobjectives import GRPO, Objective
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Doubt(PolicyCorrection):
        ...     below: float = -5.0
        ...     def token_weights(self, tokens, context):
        ...         surprised = tokens.need("behavior_logprobs", "Doubt") < self.below
        ...         return TokenWeights(torch.where(surprised, 0.5, 1.0), tokens.layout.mask)
        >>> Objective(estimator=GRPO(), correction=Doubt(below=-3.0)).correction.below
        -3.0
    """

    @abc.abstractmethod
    def token_weights(self, tokens: TokenBatch, context: WindowContext) -> TokenWeights:
        """Weight and verdict of each token.

        Args:
            tokens: One micro-batch, without gradient.
            context: What the window knows.
        """

    def keep(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        """Which tokens stay, bool, shaped like the mask."""
        return self.token_weights(tokens, context).keep


def denominator_conflict(part: PolicyCorrection, reduction: Component | None) -> Iterable[str]:
    """Denominators that dropped tokens cannot leave, because the reduction does not get them from the mask."""
    if part.shrinks_denominator and isinstance(reduction, LossReduction) and not reduction.follows_mask:
        yield (
            f"{type(part).__name__} takes dropped tokens out of the denominators, which "
            f"{type(reduction).__name__} gets from the layout of whole prompts. Use denominator='original', "
            "or another reduction."
        )
