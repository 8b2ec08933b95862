"""RLOO: each answer against the mean of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.group_advantages import grpo_estimate
from rlobjectives.maths.groups import check_singletons
from rlobjectives.rollouts import Rollouts

__all__ = ["RLOO"]


@dataclass(frozen=True, kw_only=True)
class RLOO(RewardWeights, Estimator):
    """REINFORCE with a leave-one-out baseline.

        Aᵢ = rᵢ − (Σⱼ rⱼ − rᵢ) / (G − 1) = G / (G − 1) · (rᵢ − mean_g r)

    No standard deviation. A constant group gives exactly zero.

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: On a bad option, or a singleton group in the data.

    Source:
        Back to Basics, arXiv:2402.14740. A singleton is the raw reward in verl's loop, 0 in its
        vectorised form and in TRL. TRL's trainer puts a clipped sequence-level ratio on top.

    Example:
        >>> import torch
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> RLOO().estimate(rollouts)
        tensor([ 1., -1.], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)
    examples = ({"weights": (0.5, 2.0)},)

    on_singleton: Literal["error", "zero"] = "error"

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Leave-one-out advantages ``[n]``. Scope: group."""
        check_singletons(rollouts, "RLOO", self.on_singleton)
        reward = self.combined(rollouts)
        return grpo_estimate(
            reward.total,
            reward.scored,
            rollouts,
            scale="none",
            baseline="leave_one_out",
            tolerance=reward.tolerance(),
        ).squeeze(1)
