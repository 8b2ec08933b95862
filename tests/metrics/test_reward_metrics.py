"""What people watch about rewards, whole and merged over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlobjectives import GAE, GDPO, GRPO, Objective, PaddedLayout, Rollouts, Stat, TokenBatch, reward_metrics
from rlobjectives.metrics.rewards import REWARD_METRICS
from rlobjectives.testing.simulate import run_ranks_as_threads

REWARDS = torch.tensor([[1.0, 5.0], [1.0, 6.0], [0.0, 1.0], [1.0, 1.0], [3.0, torch.nan], [7.0, torch.nan]])
SCORED = torch.tensor([[True, True]] * 4 + [[True, False], [False, False]])
IDS = torch.tensor([0, 0, 1, 1, 9, 5])


def rollouts(rows: slice = slice(None)) -> Rollouts:
    return Rollouts(
        rewards=REWARDS[rows], scored=SCORED[rows], group_ids=IDS[rows], reward_names=("right", "short")
    )


def numbers(stats: dict[str, Stat]) -> dict[str, float]:
    return {
        label: float(value)
        for name, stat in stats.items()
        if bool(stat.measured)
        for label, value in stat.report(name).items()
    }


EXPECTED = {
    "reward/mean": 3.8,  # of 6, 7, 1, 2 and 3: the last sequence has no reward at all
    "reward/std": 2.588435821108957,
    "reward/right/mean": 1.2,
    "reward/right/std": 1.0954451150103321,
    "reward/right/constant_group_fraction": 0.75,  # groups 0 and the two singletons
    "reward/short/mean": 3.25,
    "reward/short/std": 2.6299556396765835,
    "reward/short/constant_group_fraction": 0.75,
    "reward/singleton_fraction": 0.5,
    "reward/unscored_fraction": 0.25,
    "reward/unscored_sequence_fraction": 1 / 6,
}


def test_the_numbers() -> None:
    assert numbers(reward_metrics(rollouts())) == pytest.approx(EXPECTED)


@pytest.mark.parametrize(("weights", "constant"), [((1.0, 1.0), 0.5), ((1.0, 0.0), 0.75), ((0.0, 1.0), 0.75)])
def test_dead_groups_are_judged_on_the_combined_advantage(weights: Any, constant: float) -> None:
    part = GDPO(weights=weights, on_singleton="zero")
    assert numbers(reward_metrics(rollouts(), part))["reward/constant_group_fraction"] == constant


def test_a_token_level_estimator_judges_no_groups() -> None:
    assert "reward/constant_group_fraction" not in reward_metrics(rollouts(), GAE())


def test_ranks_merge_whatever_they_hold() -> None:
    """A rank without sequences reports the same names and changes nothing."""
    objective, shards = Objective(estimator=GRPO()), [slice(0, 2), slice(2, 2), slice(2, 6)]

    def one(communicator: Any) -> dict[str, float]:
        own = rollouts(shards[communicator.rank])
        layout = PaddedLayout(torch.ones(own.num_sequences, 1, dtype=torch.bool))
        window = objective.freeze([(torch.zeros(own.num_sequences), layout)], communicator)
        zeros = torch.zeros(layout.shape)
        output = window.loss(TokenBatch(logprobs=zeros, advantages=zeros, layout=layout))
        return window.summarize([output], reward_metrics(own, GRPO(on_singleton="zero")))

    found = run_ranks_as_threads(one, 3)
    assert found[0] == found[1] == found[2]
    assert {name: found[0][name] for name in EXPECTED} == pytest.approx(EXPECTED)
    assert found[0]["window/sequences"] == 6.0


def test_every_name_is_declared() -> None:
    for name in reward_metrics(rollouts(), GRPO(on_singleton="zero")):
        assert name.replace("right", "<name>").replace("short", "<name>") in REWARD_METRICS
