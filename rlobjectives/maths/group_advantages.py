"""A reward against those of its prompt group: centred, and divided by their spread."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlobjectives.maths.groups import group_moments, others_constant, others_m2
from rlobjectives.rollouts import Groups, Rollouts

__all__ = ["grpo_estimate", "standardised"]


def grpo_estimate(
    rewards: Tensor,
    scored: Tensor,
    rollouts: Rollouts,
    *,
    scale: str = "group",
    baseline: str = "inclusive",
    epsilon: float = 1e-6,
    epsilon_mode: str = "add",
    ddof: Literal[0, 1] = 1,
    tolerance: Tensor | None = None,
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
        tolerance: Largest difference within a group that is none, ``[g, r]``, for rewards that were added up from
            several; None compares exactly.

    Returns:
        ``[n, r]``. Scope: group. Gradient: none.
    """
    options = {"scale": scale, "baseline": baseline, "epsilon_mode": epsilon_mode}
    return standardised(
        rewards, scored, rollouts.groups, epsilon=epsilon, ddof=ddof, tolerance=tolerance, **options
    )[0]


def standardised(
    rewards: Tensor,
    scored: Tensor,
    groups: Groups,
    *,
    scale: str,
    baseline: str,
    epsilon: float,
    epsilon_mode: str = "add",
    ddof: Literal[0, 1] = 1,
    tolerance: Tensor | None = None,
) -> tuple[Tensor, Tensor | float]:
    """What `grpo_estimate` gives, and what each entry was divided by.

    Args:
        rewards: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``.
        groups: The prompt groups.
        scale: As there, and so are the rest.
        baseline: The mean.
        epsilon: Stability constant.
        epsilon_mode: How it enters.
        ddof: Of the standard deviation.
        tolerance: What rounding explains.
    """
    moments = group_moments(rewards, scored, groups, tolerance)

    def divisor(std: Tensor, without_spread: Tensor) -> Tensor:
        return torch.where(
            without_spread, 1.0, std + epsilon if epsilon_mode == "add" else std.clamp_min(epsilon)
        )

    if baseline == "inclusive":
        if scale == "none":
            return moments.deviation, 1.0
        inclusive = moments.at_sequences(divisor(moments.std(ddof), moments.constants))
        return moments.deviation / inclusive, inclusive
    # The others' mean is the group's minus d/(c−1).
    others = (moments.count - 1.0).clamp_min(1.0)
    share = moments.count / others
    if scale == "none":
        return moments.deviation * share, 1.0
    m2 = others_m2(rewards, scored, groups, moments, tolerance)
    std = (m2 / (others - ddof).clamp_min(1.0)).sqrt()
    # Where the others are all equal (always with G = 2) there is no spread to divide by: centre only.
    exclusive = divisor(std, others_constant(rewards, scored, groups, tolerance))
    return moments.deviation * share / exclusive, exclusive
