"""The plain policy gradient: no ratio, no clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import WindowContext
from rlobjectives.losses.base import PolicyLoss, TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["Reinforce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(PolicyLoss):
    """REINFORCE: ``Lₜ = −Aₜ·ℓₜ``, slope ``−Aₜ``.

    There is no ratio to correct with, so samples must come from the current policy: one update a
    rollout, no staleness.

    Source:
        Williams 1992; as the objective of RLOO: arXiv:2402.14740.

    Example:
        >>> Reinforce().required().requires_on_policy
        True
    """

    capabilities: ClassVar[Capabilities] = Capabilities(requires_on_policy=True)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss and slope of each token."""
        del context
        layout, logprobs = tokens.layout, tokens.logprobs.detach()
        slope = -layout.select(tokens.need("advantages", "Reinforce")).to(logprobs.dtype)
        return TokenLoss(slope * layout.select(logprobs), slope)
