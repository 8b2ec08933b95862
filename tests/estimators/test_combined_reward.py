"""Sums of several rewards: what only rounding tells apart is equal, and everything else is not."""

from __future__ import annotations

import pytest
import torch

from rlobjectives import GPG, GRPO, RLOO, BatchBaseline, Objective, PaddedLayout, PassAtK, Rollouts

THREE_TENTHS = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [1.0, -0.7]]
"""One sum, in several roundings."""


@pytest.mark.parametrize(
    "estimator",
    [
        GRPO(),
        GRPO(baseline="leave_one_out"),
        GRPO(scale="none"),
        RLOO(),
        PassAtK(form="max_minus_second"),
        GPG(),
    ],
)
def test_sums_that_differ_by_rounding_are_equal(estimator):
    rewards = torch.tensor([*THREE_TENTHS, [0.5, 0.5], [0.5, 0.4]], dtype=torch.float64)
    assert len(set(rewards.sum(1)[:4].tolist())) > 1
    rollouts = Rollouts(rewards=rewards, group_ids=torch.tensor([0, 0, 0, 0, 1, 1]))
    estimate = estimator.estimate(rollouts)
    estimate = estimate if estimate.dim() == 1 else estimate[:, 0]
    assert estimate[:4].tolist() == [0.0] * 4
    assert estimate[4] > estimate[5]
    assert estimator.carries_signal(rollouts).tolist() == [False, True]


def test_the_others_of_leave_one_out_are_equal_up_to_rounding():
    """Nothing is divided by the rounding of a sum."""
    rewards = torch.tensor([[0.5, 0.8], *THREE_TENTHS], dtype=torch.float64)
    rollouts = Rollouts(rewards=rewards, group_ids=torch.zeros(5, dtype=torch.int64))
    found = GRPO(baseline="leave_one_out", epsilon=0.0).estimate(rollouts)
    assert found[0].item() == pytest.approx(1.0)


def test_weights_are_rounded_too():
    rollouts = Rollouts(rewards=torch.tensor([[1.0, 2.0], [3.0, 0.0]]), group_ids=torch.tensor([0, 0]))
    assert GRPO(weights=(0.1, 0.1)).estimate(rollouts).tolist() == [0.0, 0.0]


def test_small_differences_are_no_rounding():
    """One part in 10¹² stays."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1e-12], [0.0, 0.0], [0.0, 1e-300]], dtype=torch.float64)
    rollouts = Rollouts(rewards=rewards, group_ids=torch.tensor([0, 0, 1, 1]))
    estimate = GRPO(scale="none").estimate(rollouts)
    assert estimate[:2].tolist() == pytest.approx([-5e-13, 5e-13], rel=1e-3)
    assert estimate[2:].tolist() == pytest.approx([-5e-301, 5e-301])


def test_a_window_of_one_sum_is_exactly_zero():
    """Also where groups play no part."""
    layout = PaddedLayout(torch.ones(4, 1, dtype=torch.bool))
    for scale in ("none", "batch"):
        objective = Objective(estimator=BatchBaseline(scale=scale, epsilon=0.0))
        rollouts = Rollouts(
            rewards=torch.tensor(THREE_TENTHS, dtype=torch.float64), group_ids=torch.tensor([0, 0, 1, 1])
        )
        estimate = objective.estimator.estimate(rollouts)
        advantages = objective.freeze([(estimate, layout)]).advantages(estimate, layout)
        assert advantages.flatten().tolist() == [0.0] * 4


def test_no_sequence_at_all_and_one():
    for count in (0, 1):
        rollouts = Rollouts(rewards=torch.ones(count, 2), group_ids=torch.zeros(count, dtype=torch.int64))
        assert GRPO(on_singleton="zero").estimate(rollouts).tolist() == [0.0] * count
