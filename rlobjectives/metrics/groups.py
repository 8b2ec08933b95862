"""How much the prompt groups of a rollout have to teach."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_shape
from rlobjectives.component import Metric
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.maths.groups import group_moments
from rlobjectives.maths.reward_sum import combined_reward
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Mean, Stat

__all__ = ["GROUP_METRICS", "group_metrics"]


GROUP_METRICS = {
    "group/baseline_mean": Metric(Mean, "reward", "mean of the other answers' reward, over scored sequences"),
    "group/advantage_abs_mean": Metric(Mean, "reward", "distance of a reward to the others' mean"),
    "group/no_signal_token_fraction": Metric(Mean, "fraction", "tokens in groups without any advantage"),
    "group/empty_response_fraction": Metric(Mean, "fraction", "sequences without an action token"),
    "group/zero_advantage_fraction": Metric(Mean, "fraction", "groups without any advantage"),
    "group/dropped_fraction": Metric(Mean, "fraction", "groups that were filtered out before"),
}


def group_metrics(
    rollouts: Rollouts,
    estimator: Estimator | None = None,
    *,
    estimate: Tensor | None = None,
    dropped_groups: int | None = None,
    lengths: Tensor | None = None,
) -> dict[str, Stat]:
    """How much the groups of these rollouts have to teach.

    Baselines are those of the raw rewards, combined by the estimator's weights; which groups have anything to teach is
    judged by the estimator's advantages. Sequences that nobody scored have no baseline and are left out of it; so are
    those without a scored sibling. Dummies count for nothing.

    Args:
        rollouts: Whole prompt groups, with a layout.
        estimator: Reads the groups. One that compares no answers to one prompt (`GAE`, `BatchBaseline`) has none of
            these numbers, and only ``group/empty_response_fraction`` is left. Without an estimator, raw rewards that
            all weigh 1 are judged.
        estimate: What the estimator gave for them, where that is known already.
        dropped_groups: Groups that a filter took out before, on this rank; None where nobody counted them, which
            leaves ``group/dropped_fraction`` out.
        lengths: Response tokens ``[n]``; by default, those the mask counts, which leaves out what it drops.

    Returns:
        The ``group/…`` statistics of `GROUP_METRICS`. Scope: what is merged later.

    Raises:
        MissingColumnError: Without a layout.
        CapabilityError: If ``dropped_groups`` is negative.
        ShapeError: If there is not one length per sequence.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]),
        ...     layout=PaddedLayout(torch.tensor([[True], [True]])),
        ... )
        >>> group_metrics(rollouts)["group/advantage_abs_mean"].value
        tensor(1., dtype=torch.float64)
    """
    if dropped_groups is not None and dropped_groups < 0:
        raise CapabilityError(f"dropped_groups is {dropped_groups}; expected a count.")
    layout, genuine = rollouts.tokens("group_metrics"), rollouts.genuine
    if lengths is not None:
        check_shape("lengths", lengths, (rollouts.num_sequences,), "one length per sequence")
    tokens = layout.token_counts()
    empty = (tokens if lengths is None else lengths) == 0
    found: dict[str, Stat] = {"group/empty_response_fraction": Mean.of(empty.double(), genuine)}
    if estimator is None or estimator.compares_siblings:
        found.update(_signal(rollouts, estimator, estimate, tokens))
    if dropped_groups is not None:
        counted = rollouts.group_mask.sum(dtype=torch.float64)
        found["group/dropped_fraction"] = Mean(
            torch.stack([torch.full_like(counted, dropped_groups), counted + dropped_groups])
        )
    return found


def _signal(
    rollouts: Rollouts, estimator: Estimator | None, estimate: Tensor | None, tokens: Tensor
) -> dict[str, Stat]:
    groups, genuine, counted = rollouts.groups, rollouts.genuine, rollouts.group_mask
    assert rollouts.reward_names is not None
    weights = None if estimator is None else estimator.reward_weights(rollouts.reward_names)
    reward = combined_reward(rollouts, weights)
    rewards, scored = reward.total, reward.scored & genuine.unsqueeze(1)
    moments = group_moments(rewards, scored, groups, reward.tolerance())
    constant = moments.constants.squeeze(1)
    if estimator is not None and not estimator.token_level:
        constant = ~estimator.carries_signal(rollouts, estimate)
    paired = (scored & (moments.count > 1)).squeeze(1)
    others = (moments.count * moments.mean - rewards) / (moments.count - 1.0).clamp_min(1.0)
    distance = torch.where(moments.constant, 0.0, rewards - others).abs()
    unused = torch.where(constant[groups.index], tokens, 0.0).sum()
    return {
        "group/baseline_mean": Mean.of(others.squeeze(1), paired),
        "group/advantage_abs_mean": Mean.of(distance.squeeze(1), paired),
        "group/no_signal_token_fraction": Mean(torch.stack([unused, tokens.sum()])),
        "group/zero_advantage_fraction": Mean.of(constant.double(), counted),
    }
