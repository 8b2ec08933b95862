"""MaxRL: the centred reward over the group's mean, so that hard prompts weigh more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import refuse_rows
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.groups import check_singletons, group_moments
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["MaxRL"]


@dataclass(frozen=True, kw_only=True)
class MaxRL(RewardWeights, Estimator):
    """Reward over its group's mean, minus one.

        Aᵢ = (rᵢ − mean_g r) / (mean_g r + ε)

    Only for rewards ≥ 0: with a negative mean the sign of every advantage would turn over. A constant group
    gives exactly zero.

    Args:
        weights: One weight ≥ 0 a reward, in column order or by name; None weighs all 1.
        epsilon: Stability constant in reward units.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: On a bad option, a negative reward, or a singleton group in the data.

    Source:
        As ``MAXRL`` in SkyRL, which does not check the sign.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> MaxRL(epsilon=0.0).estimate(rollouts)
        tensor([ 1., -1.], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)
    refuses: ClassVar[frozenset[str]] = frozenset({"negative_rewards"})
    shift_invariant: ClassVar[bool] = False
    waits_for_device = True
    lowest_weight: ClassVar[float] = 0.0

    epsilon: float = option(1e-6, low=0)
    on_singleton: Literal["error", "zero"] = "error"

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Advantages ``[n]``. Scope: group."""
        check_singletons(rollouts, "MaxRL", self.on_singleton)
        refuse_rows(
            (rollouts.rewards < 0).any(1),
            "have a negative reward, which MaxRL cannot divide by the mean of",
            'Shift the rewards to start at 0, or choose GRPO(scale="none").',
        )
        reward = self.combined(rollouts)
        moments = group_moments(reward.total, reward.scored, rollouts.groups, reward.tolerance())
        divisor = torch.where(moments.constant, 1.0, moments.mean + self.epsilon)
        advantage = (reward.total - moments.mean) / divisor
        return torch.where(moments.constant | ~reward.scored, 0.0, advantage).squeeze(1)
