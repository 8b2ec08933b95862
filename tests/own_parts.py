"""Parts as a user's own project has them: one of each kind, in a file that the package knows nothing of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlobjectives import (
    GRPO,
    AdvantageShaping,
    Component,
    Estimator,
    FixedBudget,
    LossReduction,
    Mean,
    Metric,
    Objective,
    PolicyCorrection,
    PolicyLoss,
    Rollouts,
    TokenMetric,
    TokenTerm,
    TokenWeights,
)
from rlobjectives.checks import check_number


@dataclass(frozen=True, kw_only=True)
class OwnEstimator(Estimator):
    scale: float = 1.0

    def estimate(self, rollouts):
        return self.scale * (rollouts.rewards.sum(1) - rollouts.group_mean(rollouts.rewards.sum(1)))


@dataclass(frozen=True, kw_only=True)
class OwnLoss(PolicyLoss):
    scale: float = 1.0

    def value(self, tokens, context):
        return -self.scale * tokens.advantages * tokens.logprobs


@dataclass(frozen=True, kw_only=True)
class OwnReduction(LossReduction):
    scale: float = 1.0

    def weights(self, layout, context):
        return self.scale * torch.ones(layout.num_sequences).double() / context.tokens


@dataclass(frozen=True, kw_only=True)
class OwnCorrection(PolicyCorrection):
    scale: float = 1.0

    def __post_init__(self):
        check_number("scale", self.scale, low=0.0)

    def token_weights(self, tokens, context):
        return TokenWeights(torch.full_like(tokens.logprobs, self.scale), tokens.layout.mask)


@dataclass(frozen=True, kw_only=True)
class OwnTerm(TokenTerm):
    scale: float = 1.0

    def value(self, tokens, context):
        return self.scale * tokens.logprobs.square()


@dataclass(frozen=True, kw_only=True)
class OwnShaping(AdvantageShaping):
    scale: float = 1.0

    def shape(self, tokens):
        return tokens.replace(advantages=self.scale * tokens.need("advantages", "OwnShaping")), {}


@dataclass(frozen=True, kw_only=True)
class OwnMetric(TokenMetric):
    scale: float = 1.0
    metrics = {"own/certainty": Metric(Mean, "probability", "probability of the sampled tokens")}

    def measure(self, tokens, context):
        return {"own/certainty": Mean.of(self.scale * tokens.logprobs.exp(), tokens.layout.mask)}


SLOTS: Mapping[str, type[Component]] = {
    "estimator": OwnEstimator,
    "policy_loss": OwnLoss,
    "reduction": OwnReduction,
    "correction": OwnCorrection,
    "off_policy_mask": OwnCorrection,
    "entropy_mask": OwnCorrection,
    "kl": OwnTerm,
    "value_loss": OwnTerm,
    "distillation": OwnShaping,
    "terms": OwnTerm,
    "metrics": OwnMetric,
}
"""What may stand in each field of an objective."""

whole = OwnTerm(scale=3.0)


def centred(rollouts: Rollouts) -> torch.Tensor:
    """An estimator that is a plain function."""
    return rollouts.rewards.sum(1) - rollouts.group_mean(rollouts.rewards.sum(1))


def ready(budget: int = 3) -> Objective:
    """A whole objective."""
    return Objective(estimator=GRPO(), reduction=FixedBudget(max_tokens=budget))
