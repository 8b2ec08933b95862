"""OPO: the reward against the length-weighted mean of its prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.groups import check_singletons, group_moments, group_sum
from rlobjectives.rollouts import Rollouts

__all__ = ["OPO"]


@dataclass(frozen=True, kw_only=True)
class OPO(RewardWeights, Estimator):
    """Centre each reward on its group's mean weighted by response length.

        b = Σⱼ Lⱼrⱼ / Σⱼ Lⱼ        Aᵢ = rᵢ − b        L: action tokens of the whole response

    An empty response does not move the baseline; a group of empty responses gives 0, for none of its tokens
    counts. A constant group gives exactly zero.

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: On a bad option, or a singleton group in the data.
        MissingColumnError: Without a layout.

    Source:
        arXiv:2505.23585. A singleton is the raw reward in verl and 0 in xtuner, which adds 1e-8 to ΣL.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]),
        ...     layout=PaddedLayout(torch.tensor([[True, True, True], [True, False, False]])),
        ... )
        >>> OPO().estimate(rollouts)
        tensor([ 0.2500, -0.7500], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)

    on_singleton: Literal["error", "zero"] = "error"

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Centred rewards ``[n]``. Scope: group."""
        check_singletons(rollouts, "OPO", self.on_singleton)
        reward = self.combined(rollouts)
        rewards, scored = reward.total, reward.scored
        lengths = torch.where(scored, rollouts.tokens("OPO").token_counts().unsqueeze(1), 0.0)
        total = group_sum(lengths, rollouts.groups)[rollouts.groups.index]
        weighted = group_sum(lengths * rewards, rollouts.groups)[rollouts.groups.index]
        constant = group_moments(rewards, scored, rollouts.groups, reward.tolerance()).constant
        advantage = rewards - weighted / total.clamp_min(1.0)
        return torch.where(constant | ~scored | (total == 0), 0.0, advantage).squeeze(1)
