"""What people watch about rewards: spread, dead groups, missing scores. From the raw rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.component import Metric
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.groups import group_moments
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Mean, Moments, Stat

__all__ = ["REWARD_METRICS", "reward_metrics"]

REWARD_METRICS = {
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


def reward_metrics(rollouts: Rollouts, estimator: Estimator | None = None) -> dict[str, Stat]:
    """Reward metrics of this rank's rollouts, ready to be merged with everybody else's.

    Args:
        rollouts: Whole prompt groups.
        estimator: Judges which groups carry signal, on the combined advantage. Without one, or for a
            token-level estimator, ``reward/constant_group_fraction`` is left out.

    Returns:
        Statistics by name (see `REWARD_METRICS`); hand them to `Window.summarize` or `synchronize`.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 1.0]), group_ids=torch.tensor([0, 0]))
        >>> reward_metrics(rollouts)["reward/reward_0/constant_group_fraction"].value
        tensor(1., dtype=torch.float64)
    """
    rewards, scored, groups = rollouts.rewards, rollouts.scored, rollouts.groups
    assert scored is not None and rollouts.reward_names is not None
    moments = group_moments(rewards, scored, groups)
    found: dict[str, Stat] = {}
    for column, name in enumerate(rollouts.reward_names):
        found[f"reward/{name}/"] = Moments.of(rewards[:, column], scored[:, column])
        constant = _per_group(moments.constant[:, column], rollouts)
        found[f"reward/{name}/constant_group_fraction"] = Mean.of(constant)
    if estimator is not None and not estimator.token_level:
        found["reward/constant_group_fraction"] = Mean.of((~estimator.carries_signal(rollouts)).double())
    found["reward/singleton_fraction"] = Mean.of((groups.sizes == 1).double())
    found["reward/unscored_fraction"] = Mean.of((~scored).double())
    found["reward/unscored_sequence_fraction"] = Mean.of((~scored.any(1)).double())
    return found


def _per_group(flag: Tensor, rollouts: Rollouts) -> Tensor:
    zeros = torch.zeros(rollouts.groups.count, dtype=torch.float64, device=flag.device)
    return zeros.index_copy(0, rollouts.groups.index, flag.double())
