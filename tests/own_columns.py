"""Parts that read columns which the library knows nothing of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlobjectives import (
    Column,
    Estimator,
    Objective,
    PolicyCorrection,
    Reinforce,
    TokenLoss,
    TokenTerm,
    TokenWeights,
    read,
)

CONFIDENCE = Column("confidence", "how sure the tool was of a token, in [0, 1]")
SCORE = Column("score", "the teacher's mark of the answer", per="sequence")
GATE = Column("gate", "a head of the policy", gradient=True)


@dataclass(frozen=True, kw_only=True)
class ByConfidence(PolicyCorrection):
    """Weighs each token by a tool's confidence."""

    reads = (CONFIDENCE,)

    def token_weights(self, tokens: Any, context: Any) -> TokenWeights:
        del context
        return TokenWeights(tokens.need("confidence", self), tokens.layout.mask)


@dataclass(frozen=True, kw_only=True)
class Marked(TokenTerm):
    """Adds the teacher's mark of the sequence times the log-probability."""

    reads = (SCORE,)
    coef: float = 0.5

    def value(self, tokens: Any, context: Any) -> Any:
        del context
        return self.coef * tokens.layout.expand(tokens.need("score", self)) * tokens.logprobs


@dataclass(frozen=True, kw_only=True)
class Gated(TokenTerm):
    """Adds the square of a column that carries gradient."""

    reads = (read(GATE, required=False),)

    def value_and_slope(self, tokens: Any, context: Any) -> TokenLoss:
        del context
        gate = tokens.get("gate")
        if gate is None:
            return TokenLoss(torch.zeros_like(tokens.logprobs), torch.zeros_like(tokens.logprobs))
        gate = gate.detach()
        return TokenLoss(gate**2, torch.zeros_like(gate), slopes={"gate": 2 * gate})


@dataclass(frozen=True, kw_only=True)
class FromMarks(Estimator):
    """Rewards plus the teacher's mark."""

    reads = (SCORE,)

    def estimate(self, rollouts: Any) -> Any:
        return rollouts.rewards.sum(1) + rollouts.need("score", self)


OBJECTIVE = Objective(
    estimator=FromMarks(), policy_loss=Reinforce(), correction=ByConfidence(), terms=(Marked(),), name="own"
)
