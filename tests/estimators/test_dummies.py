"""A row that only keeps ranks in step says nothing about the prompt that it repeats."""

from __future__ import annotations

import math

import pytest
import torch

from rlobjectives import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    BatchBaseline,
    Combined,
    Estimator,
    MaxRL,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Rollouts,
    TDLambda,
    TeacherSignal,
    VTrace,
)

ESTIMATORS = [
    GRPO(),
    GRPO(scale="none", baseline="leave_one_out"),
    GRPO(scale="batch"),
    GDPO(),
    GDPO(whiten_unit="token"),
    RLOO(),
    OPO(),
    GPG(),
    PassAtK(threshold=0.8),
    PassAtK(form="max_minus_second"),
    MaxRL(),
    BatchBaseline(scale="batch"),
    GAE(normalize="window"),
    TDLambda(),
    VTrace(),
    ReMax(),
    ReinforcePlusPlus(),
    ReinforcePlusPlusBaseline(),
    OptimalTokenBaseline(),
    Combined(estimators=(GRPO(), TeacherSignal(), GDPO())),
]


def rollouts(dummies: int, junk: float) -> Rollouts:
    """Two prompts of two answers each, and dummies that carry the number of the first prompt."""
    rows = 4 + dummies
    genuine = torch.arange(rows) < 4
    mask = genuine.unsqueeze(1) & torch.ones(rows, 3, dtype=torch.bool)
    mask[1, 2] = False
    column = torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3) * 0.1 - 2.0
    rewards = [[1.0, 0.0], [0.0, 0.5], [0.2, 1.0], [0.9, 0.3], *[[5.0, junk]] * dummies]
    return Rollouts(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor([0, 0, 1, 1, *[0] * dummies]),
        layout=PaddedLayout(mask, sequence_mask=genuine),
        greedy_rewards=torch.zeros(rows, 2),
        values=column,
        old_logprobs=column,
        behavior_logprobs=column - 0.2,
        teacher_logprobs=column + 0.1,
        squared_probs=column.exp(),
    )


@pytest.mark.parametrize("junk", [3.0, -1.0, math.nan])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_a_dummy_of_a_prompt_changes_nothing(estimator: Estimator, junk: float) -> None:
    found = []
    for data in (rollouts(0, junk), rollouts(3, junk)):
        estimate, layout = estimator.estimate(data), data.layout
        assert layout is not None
        window = Objective(estimator=estimator).freeze([(estimate, layout)])
        found.append(layout.select(window.advantages(estimate, layout)))
    assert torch.equal(found[0], found[1][:4])
    assert found[1][4:].eq(0).all()


def test_a_dummy_is_never_scored() -> None:
    data = rollouts(2, math.nan)
    assert data.scored is not None
    assert data.scored.all(1).tolist() == [True] * 4 + [False] * 2
    assert data.rewards[4:].eq(0).all()
