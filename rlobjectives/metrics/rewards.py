"""What people watch about rewards: spread, groups without a signal, missing scores. From the raw rewards."""

from __future__ import annotations

from torch import Tensor

from rlobjectives.component import Metric
from rlobjectives.estimators.base import Estimator
from rlobjectives.maths.groups import group_moments, group_sum
from rlobjectives.maths.reward_sum import combined_reward
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Mean, Moments, Stat

__all__ = ["REWARD_METRICS", "reward_metrics"]

REWARD_METRICS = {
    "reward/": Metric(Moments, "reward", "the combined, weighted reward over scored sequences, mean and std"),
    "reward/<name>/": Metric(Moments, "reward", "one reward over its scored sequences, mean and std"),
    "reward/<name>/constant_group_fraction": Metric(
        Mean, "fraction", "prompt groups in which all scored members have the same reward"
    ),
    "reward/constant_group_fraction": Metric(
        Mean, "fraction", "prompt groups whose combined advantage carries no signal"
    ),
    "reward/singleton_fraction": Metric(Mean, "fraction", "prompt groups with a single completion"),
    "reward/unscored_fraction": Metric(Mean, "fraction", "reward cells that no function scored"),
    "reward/unscored_sequence_fraction": Metric(Mean, "fraction", "sequences without any scored reward"),
}


def reward_metrics(
    rollouts: Rollouts, estimator: Estimator | None = None, *, estimate: Tensor | None = None
) -> dict[str, Stat]:
    """Reward metrics of this rank's rollouts, ready to be merged with everybody else's.

    Args:
        rollouts: Whole prompt groups.
        estimator: Weighs the rewards, and judges which groups carry signal, on the combined advantage. Without one, for
            a token-level estimator, and for one that compares no answers to one prompt,
            ``reward/constant_group_fraction`` is left out. Without one all rewards weigh 1. Dummies count for nothing.
        estimate: What the estimator gave for them, where that is known already.

    Returns:
        Statistics by name (see `REWARD_METRICS`); hand them to `Window.summarize` or `synchronize`.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 1.0]), group_ids=torch.tensor([0, 0]))
        >>> reward_metrics(rollouts)["reward/reward_0/constant_group_fraction"].value
        tensor(1., dtype=torch.float64)
    """
    rewards, groups = rollouts.rewards, rollouts.groups
    assert rollouts.scored is not None and rollouts.reward_names is not None
    genuine, counted = rollouts.genuine, rollouts.group_mask
    scored = rollouts.scored & genuine.unsqueeze(1)
    constants = group_moments(rewards, scored, groups).constants.double()
    weights = None if estimator is None else estimator.reward_weights(rollouts.reward_names)
    total = combined_reward(rollouts, weights).total.squeeze(1)
    found: dict[str, Stat] = {"reward/": Moments.of(total, scored.any(1))}
    for column, name in enumerate(rollouts.reward_names):
        found[f"reward/{name}/"] = Moments.of(rewards[:, column], scored[:, column])
        found[f"reward/{name}/constant_group_fraction"] = Mean.of(constants[:, column], counted)
    if estimator is not None and estimator.compares_siblings and not estimator.token_level:
        constant = ~estimator.carries_signal(rollouts, estimate)
        found["reward/constant_group_fraction"] = Mean.of(constant.double(), counted)
    members = group_sum(genuine.double().unsqueeze(1), groups).squeeze(1)
    found["reward/singleton_fraction"] = Mean.of((members == 1).double(), counted)
    cells = genuine.unsqueeze(1).expand_as(scored)
    found["reward/unscored_fraction"] = Mean.of((~scored).double(), cells)
    found["reward/unscored_sequence_fraction"] = Mean.of((~scored.any(1)).double(), genuine)
    return found
