"""REINFORCE with a batch baseline: every reward against the mean of the whole window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.groups import group_sum
from rlobjectives.maths.whitening import differs, whiten
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Maximum, Minimum, Moments, Stat

__all__ = ["BatchBaseline"]


@dataclass(frozen=True, kw_only=True)
class BatchBaseline(RewardWeights, Estimator):
    """Reward minus the mean reward of the optimizer window; groups play no part.

        Aᵢ = rᵢ − mean_W r        or, with ``scale="batch"``,  (rᵢ − mean_W r) / (std_W r + ε)

    The baseline contains the sequence itself, which shrinks the gradient by 1/N and leaves its direction. A
    window in which all rewards are equal (but for rounding) gives exactly zero.

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        scale: ``"none"`` or ``"batch"``.
        epsilon: Added to the standard deviation, in reward units.
        ddof: 1 sample, 0 population standard deviation.

    Raises:
        CapabilityError: On an option out of range.

    Source:
        Williams 1992. OpenRLHF's ``reinforce`` whitens tokens instead: `ReinforcePlusPlus`.

    Example:
        >>> from rlobjectives import Objective, PaddedLayout
        >>> objective = Objective(estimator=BatchBaseline())
        >>> estimate = objective.estimator.estimate(
        ...     Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 1]))
        ... )
        >>> layout = PaddedLayout(torch.ones(2, 1, dtype=torch.bool))
        >>> objective.freeze([(estimate, layout)]).advantages(estimate, layout).flatten()
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {
        "rewards": Moments,
        "highest": Maximum,
        "lowest": Minimum,
        "rounding": Maximum,
    }

    scale: Literal["none", "batch"] = "none"
    epsilon: float = option(1e-6, low=0)
    ddof: Literal[0, 1] = 1

    @property
    def compares_window(self) -> bool:
        """It does nothing else."""
        return True

    def few_samples(self, context: WindowContext) -> Tensor | None:
        """Whether there are fewer than two rewards to take the mean of."""
        return context["rewards"].weight < 2

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """The reward, whether it is scored, and how far rounding may have moved it."""
        return ("reward", "scored", "rounding")

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """``[n, 3]``: the raw reward, whether it is scored, and how far rounding may have moved it. Scope: sequence."""
        reward = self.combined(rollouts)
        return torch.cat([reward.total, reward.scored.double(), reward.rounding], dim=1)

    def carries_signal(self, rollouts: Rollouts, estimate: Tensor | None = None) -> Tensor:
        """Every group with a scored reward: whether the window's rewards differ is not a matter of groups."""
        del estimate
        assert rollouts.scored is not None
        scored = rollouts.scored.any(1) & rollouts.genuine
        return group_sum(scored.double().unsqueeze(1), rollouts.groups).squeeze(1) > 0

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Moments and range of the scored sequences' rewards."""
        rewards, scored, rounding = estimate.unbind(1)
        counted = layout.sequence_mask() & (scored > 0)
        return {
            "rewards": Moments.of(rewards, counted),
            "highest": Maximum.of(rewards, counted),
            "lowest": Minimum.of(rewards, counted),
            "rounding": Maximum.of(rounding, counted),
        }

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Subtract the window's mean; divide by its spread if asked."""
        del layout
        moments = context.get("rewards", Moments)
        reward, scored, _ = estimate.unbind(1)
        advantage = reward - moments.mean
        if self.scale == "batch":
            advantage = whiten(reward, moments, ddof=self.ddof, epsilon=self.epsilon)
        return torch.where((scored > 0) & differs(context), advantage, 0.0)
