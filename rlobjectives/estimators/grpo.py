"""GRPO and Dr.GRPO's centring: a reward against the other answers to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import check_choice, check_number, check_numbers
from rlobjectives.component import WindowContext
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.groups import check_singletons, group_moments, others_constant, others_m2
from rlobjectives.layouts import TokenLayout
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Moments, Stat

__all__ = ["GRPO", "combined_reward", "grpo_estimate", "weighted_columns"]


def combined_reward(rollouts: Rollouts, weights: tuple[float, ...] | None) -> tuple[Tensor, Tensor]:
    """The weighted sum of a sequence's rewards, and whether it has any.

    Missing cells add nothing. A sequence none of whose rewards is scored has no reward at all,
    which is not a reward of zero.

    Args:
        rollouts: Rewards ``[n, r]`` and their `scored` mask.
        weights: One weight a reward; None is 1 for each.

    Returns:
        Float64 ``[n, 1]`` and bool ``[n, 1]``.

    Raises:
        CapabilityError: If there is not one weight a reward.
    """
    rewards, scored = rollouts.rewards, rollouts.scored
    assert scored is not None
    if weights is not None and len(weights) != rewards.shape[1]:
        raise CapabilityError(
            f"there are {len(weights)} weights for {rewards.shape[1]} rewards {rollouts.reward_names}. "
            "Give one weight a reward."
        )
    total = rewards.sum(1) if weights is None else weighted_columns(rewards, weights)
    return total.unsqueeze(1), scored.any(1, keepdim=True)


def weighted_columns(values: Tensor, weights: Sequence[float]) -> Tensor:
    """``Σₖ wₖ·vᵢₖ`` of a handful of columns; the weights stay numbers, so nothing is copied to the device."""
    total = values.new_zeros(values.shape[0])
    for column, weight in zip(values.unbind(1), weights, strict=True):
        total = total + weight * column
    return total


def grpo_estimate(
    rewards: Tensor,
    scored: Tensor,
    rollouts: Rollouts,
    *,
    scale: str = "group",
    baseline: str = "inclusive",
    epsilon: float = 1e-6,
    epsilon_mode: str = "add",
    ddof: int = 1,
) -> Tensor:
    """Centre each column on its group, then divide by the group's standard deviation.

        Aᵢ = (rᵢ − mean_g) / (std_g + ε)

    A column that is constant in a group gives exactly zero there, and so does an unscored cell.

    Args:
        rewards: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``.
        rollouts: Supplies the groups.
        scale: ``"group"`` divides by the group's std; ``"none"`` only centres (Dr.GRPO).
        baseline: ``"inclusive"`` mean, or ``"leave_one_out"`` (mean and std of the *other* members).
        epsilon: Stability constant, in reward units.
        epsilon_mode: ``"add"`` gives ``std + ε``, ``"clamp"`` gives ``max(std, ε)``.
        ddof: 1 for the sample, 0 for the population standard deviation.

    Returns:
        ``[n, r]``. Scope: group. Gradient: none.
    """
    moments = group_moments(rewards, scored, rollouts.groups)

    def divisor(std: Tensor, without_spread: Tensor) -> Tensor:
        return torch.where(
            without_spread, 1.0, std + epsilon if epsilon_mode == "add" else std.clamp_min(epsilon)
        )

    if baseline == "inclusive":
        if scale == "none":
            return moments.deviation
        return moments.deviation / moments.at_sequences(divisor(moments.std(ddof), moments.constants))
    # The others' mean is the group's minus d/(c−1).
    others = (moments.count - 1.0).clamp_min(1.0)
    share = moments.count / others
    if scale == "none":
        return moments.deviation * share
    m2 = others_m2(rewards, scored, rollouts.groups, moments)
    std = (m2 / (others - ddof).clamp_min(1.0)).sqrt()
    # Where the others are all equal (always with G = 2) there is no spread to divide by: centre only.
    return moments.deviation * share / divisor(std, others_constant(rewards, scored, rollouts.groups))


@dataclass(frozen=True, kw_only=True)
class GRPO(Estimator):
    """Group-relative advantage: the reward minus its group's mean, over the group's std.

        rᵢ = Σₖ wₖ rᵢₖ        Aᵢ = (rᵢ − mean_g r) / (std_g r + ε)

    ``scale="none"`` is the centring of Dr.GRPO (whose other half is the `FixedBudget` reduction).
    A constant group gives exactly zero. A sequence without any scored reward gets zero and does not
    enter its siblings' baseline.

    Args:
        weights: Weight of each reward column; None weighs all 1.
        scale: ``"group"``, ``"batch"`` (std of raw rewards over the optimizer window) or ``"none"``.
        baseline: ``"inclusive"`` or ``"leave_one_out"``. Where the other completions are all equal (with
            two, always) they have no spread to divide by: then the difference itself is the advantage.
        epsilon: Stability constant in reward units.
        epsilon_mode: ``"add"`` (std + ε) or ``"clamp"`` (max(std, ε)).
        ddof: 1 sample, 0 population standard deviation.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: On an option out of range, or a singleton group in the data.

    Source:
        DeepSeekMath, arXiv:2402.03300 (gives no ε and no ddof); centring only: Dr.GRPO,
        arXiv:2503.20783. verl adds 1e-6, TRL 1e-4, OpenRLHF 1e-9 to the std; torchrl clamps. Their
        singleton is the raw reward (verl), 0 (TRL) or NaN. NeMo has the leave-one-out form.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> GRPO(scale="none").estimate(rollouts)
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2)

    weights: tuple[float, ...] | None = None
    scale: Literal["group", "batch", "none"] = "group"
    baseline: Literal["inclusive", "leave_one_out"] = "inclusive"
    epsilon: float = 1e-6
    epsilon_mode: Literal["add", "clamp"] = "add"
    ddof: int = 1
    on_singleton: Literal["error", "zero"] = "error"

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("group", "batch", "none"))
        check_choice("on_singleton", self.on_singleton, ("error", "zero"))
        check_choice("baseline", self.baseline, ("inclusive", "leave_one_out"))
        check_choice("epsilon_mode", self.epsilon_mode, ("add", "clamp"))
        check_number("epsilon", self.epsilon, low=0.0)
        if self.ddof not in (0, 1):
            raise CapabilityError(f"ddof is {self.ddof!r}; expected 1 (sample) or 0 (population).")
        check_numbers("weights", self.weights)

    def required(self) -> Capabilities:
        """Dr.GRPO's centring fixes the scale, so nobody may whiten it; a window's std needs whole groups in it.

        A part of a group in a window may hold equal rewards only, whose std of zero would blow up advantages that
        are not zero.
        """
        own = Capabilities(
            forbids_normalize_advantages=self.scale == "none", supports_partial_window=self.scale != "batch"
        )
        return self.capabilities.merge(own)

    def declared_statistics(self) -> dict[str, type[Stat]]:
        """The raw rewards' moments, when they are the scale."""
        return {"rewards": Moments} if self.scale == "batch" else {}

    @property
    def columns(self) -> int:
        """The advantage; for a batch scale also the raw reward and whether it is scored."""
        return 3 if self.scale == "batch" else 1

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Group-relative advantages ``[n]`` (``[n, 3]`` under ``scale="batch"``)."""
        check_singletons(rollouts, "GRPO", self.on_singleton)
        rewards, scored = combined_reward(rollouts, self.weights)
        advantage = grpo_estimate(
            rewards,
            scored,
            rollouts,
            scale="group" if self.scale == "group" else "none",
            baseline=self.baseline,
            epsilon=self.epsilon,
            epsilon_mode=self.epsilon_mode,
            ddof=self.ddof,
        )
        if self.scale == "batch":
            return torch.cat([advantage, rewards, scored.to(rewards.dtype)], dim=1)
        return advantage.squeeze(1)

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Moments of the raw rewards of scored sequences, when they are the scale."""
        if self.scale != "batch":
            return {}
        counted = layout.sequence_mask() & (estimate[:, 2] > 0)
        return {"rewards": Moments.of(estimate[:, 1], counted)}

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Divide by the window's standard deviation of raw rewards, when that is the scale."""
        del layout
        if self.scale != "batch":
            return estimate
        moments = context["rewards"]
        assert isinstance(moments, Moments)
        std, centred = moments.std(self.ddof), estimate[:, 0]
        divisor = std + self.epsilon if self.epsilon_mode == "add" else std.clamp_min(self.epsilon)
        return torch.where(centred == 0, 0.0, centred / divisor)  # no reward differs: 0 even over 0
