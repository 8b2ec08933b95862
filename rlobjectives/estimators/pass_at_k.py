"""Pass@k: advantages for the best of k answers instead of the average one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import check_positive_int
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.groups import check_singletons, group_moments, group_sum
from rlobjectives.maths.reward_sum import RewardSum
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["PassAtK", "pass_at_k"]


def pass_at_k(count: Tensor, correct: Tensor, k: int) -> Tensor:
    """Probability that k of ``count`` answers, drawn without replacement, hold a correct one.

        ρ = 1 − C(n − c, k) / C(n, k)

    Through log-gamma, so that large groups do not overflow; exactly 1 where fewer than k are wrong.

    Args:
        count: n ≥ k, float64, any shape.
        correct: c, the same shape.
        k: At least 1.

    Raises:
        CapabilityError: If k is no positive integer.

    Example:
        >>> pass_at_k(torch.tensor([4.0]), torch.tensor([1.0]), 2)
        tensor([0.5000])
    """
    check_positive_int("k", k)
    return 1.0 - _choose_ratio(count - correct, count, k)


def _choose_ratio(few: Tensor, many: Tensor, k: int) -> Tensor:
    # C(few, k) / C(many, k); k! cancels. 1 exactly where they are equal, 0 exactly where few < k.
    def log_falling(n: Tensor) -> Tensor:
        return torch.lgamma(n + 1.0) - torch.lgamma((n - k).clamp_min(0.0) + 1.0)

    ratio = (log_falling(few.clamp_min(0.0)) - log_falling(many)).exp()
    return torch.where(few == many, 1.0, torch.where(few < k, 0.0, ratio))


@dataclass(frozen=True, kw_only=True)
class PassAtK(RewardWeights, Estimator):
    """Advantages whose objective is pass@k, in both published forms.

    ``form="analytic"``, with n scored answers of which c are correct:

        ρ = 1 − C(n−c, k)/C(n, k)        σ = √(ρ(1 − ρ))
        A⁺ = (1 − ρ)/(σ + ε)             A⁻ = (1 − ρ − C(n−c−1, k−1)/C(n−1, k−1))/(σ + ε)

    and exactly 0 where σ is 0: no answer correct, or so many that every k of them hold one.

    ``form="max_minus_second"``: only the best answer of a group is rewarded, by its lead over the second; a
    tie for the best gives 0 to all. Any rewards; k is not used.

    Args:
        k: Answers drawn, at least 1; prompts need as many completions.
        form: ``"analytic"`` or ``"max_minus_second"``.
        threshold: An answer is correct if its combined reward is greater.
        scale: For ``"max_minus_second"``: ``"group"`` divides by std + ε, ``"none"`` does not.
        weights: One weight per reward, in column order or by name; None weighs all 1.
        epsilon: Stability constant; the analytic form needs none.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with fewer than max(2, k) completions.

    Raises:
        CapabilityError: On an option out of range, or a group that is too small.

    Source:
        Analytic: arXiv:2508.10751; xtuner adds 1e-6 to σ, which turns c = 0 into −1e6, and uses ρ = c/n for
        n < k. Max minus second: arXiv:2503.19595; verl: ``form="max_minus_second", epsilon=1e-6``.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]), group_ids=torch.zeros(4).long())
        >>> PassAtK(k=2).estimate(rollouts)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)

    k: int = option(2, low=1)
    form: Literal["analytic", "max_minus_second"] = "analytic"
    threshold: float = 0.0
    scale: Literal["group", "none"] = "group"
    epsilon: float = option(0.0, low=0)
    on_singleton: Literal["error", "zero"] = "error"

    @property
    def smallest_group(self) -> int:
        """Completions a prompt needs."""
        return max(2, self.k) if self.form == "analytic" else 2

    def required(self) -> Capabilities:
        """As many completions per prompt as are drawn."""
        return super().required().merge(Capabilities(min_group_size=self.smallest_group))

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Advantages ``[n]``. Scope: group."""
        check_singletons(rollouts, "PassAtK", self.on_singleton)
        smallest = rollouts.groups.smallest
        if self.on_singleton == "error" and 0 < smallest < self.smallest_group:
            raise CapabilityError(
                f"PassAtK draws {self.k} of a prompt's completions, but a group has {smallest}. Sample at "
                f'least {self.smallest_group} per prompt, lower k, or set on_singleton="zero".'
            )
        reward = self.combined(rollouts)
        advantage = self._analytic(reward) if self.form == "analytic" else self._lead(reward)
        return torch.where(reward.scored, advantage, 0.0).squeeze(1)

    def _analytic(self, reward: RewardSum) -> Tensor:
        groups, scored = reward.groups, reward.scored
        good = reward.exceeds(self.threshold) & scored
        count, correct = (group_sum(flag.double(), groups)[groups.index] for flag in (scored, good))
        rho = pass_at_k(count, correct, self.k)
        sigma = (rho * (1.0 - rho)).sqrt()
        others = _choose_ratio(count - correct - 1.0, count - 1.0, self.k - 1)
        gain = torch.where(good, 1.0 - rho, 1.0 - rho - others)
        undefined = (sigma == 0) | (count < self.k) | (count < 2)
        return torch.where(undefined, 0.0, gain / torch.where(undefined, 1.0, sigma + self.epsilon))

    def _lead(self, reward: RewardSum) -> Tensor:
        groups, scored, tolerance = reward.groups, reward.scored, reward.tolerance()
        column = torch.where(scored, reward.total, -torch.inf).squeeze(1)
        best = _group_max(column, groups.index, groups.count)
        near = torch.zeros_like(column) if tolerance is None else tolerance.squeeze(1)[groups.index]
        first = (best[groups.index] - column <= near) & scored.squeeze(1)
        ties = group_sum(first.double().unsqueeze(1), groups)[groups.index].squeeze(1)
        second = _group_max(torch.where(first, -torch.inf, column), groups.index, groups.count)[groups.index]
        lead = torch.where(first & (ties == 1) & (second > -torch.inf), column - second, 0.0).unsqueeze(1)
        if self.scale == "none":
            return lead
        moments = group_moments(reward.total, scored, groups, tolerance)
        std = moments.at_sequences(moments.std(1)) + self.epsilon
        return torch.where(lead > 0, lead / torch.where(std > 0, std, 1.0), 0.0)


def _group_max(column: Tensor, index: Tensor, count: int) -> Tensor:
    return column.new_full((count,), -torch.inf).scatter_reduce(0, index, column, "amax")
