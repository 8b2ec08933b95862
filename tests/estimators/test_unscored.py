"""A sequence without any reward is not one of reward 0."""

from __future__ import annotations

import math

import pytest
import torch

from rlobjectives import (
    GAE,
    GRPO,
    CapabilityError,
    NonFiniteError,
    OptimalTokenBaseline,
    PaddedLayout,
    ReinforcePlusPlus,
    ReMax,
    Rollouts,
    ShapeError,
    TDLambda,
    VTrace,
)
from rlobjectives.estimators import Estimator

MASK = torch.tensor([[True, True], [True, False], [True, True]])


def rollouts(scored: list[list[bool]], mask: torch.Tensor = MASK, **columns: torch.Tensor) -> Rollouts:
    layout = PaddedLayout(mask)
    tokens = {
        name: torch.zeros(layout.shape)
        for name in ("values", "old_logprobs", "ref_logprobs", "behavior_logprobs", "squared_probs")
    }
    return Rollouts(
        rewards=torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]),
        scored=torch.tensor(scored),
        group_ids=torch.zeros(3, dtype=torch.long),
        layout=layout,
        greedy_rewards=torch.ones(3, 2),
        **{**tokens, **columns},
    )


CREDITING = [GAE(), TDLambda(), VTrace(), ReinforcePlusPlus(), ReMax()]


@pytest.mark.parametrize("part", CREDITING, ids=lambda part: type(part).__name__)
def test_who_credits_tokens_refuses_it(part: Estimator) -> None:
    with pytest.raises(CapabilityError, match=r"1 of 3 sequences have no scored reward.*sequence 1"):
        part.estimate(rollouts([[True, True], [False, False], [True, True]]))
    part.estimate(rollouts([[True, True], [True, False], [True, True]]))  # one score is enough


@pytest.mark.parametrize("part", CREDITING, ids=lambda part: type(part).__name__)
def test_masked_out_it_is_welcome(part: Estimator) -> None:
    mask = MASK & torch.tensor([[True], [False], [True]])
    found = part.estimate(rollouts([[True, True], [False, False], [True, True]], mask))
    assert found[1].eq(0).all()


@pytest.mark.parametrize("part", [GRPO(), OptimalTokenBaseline()], ids=lambda part: type(part).__name__)
def test_who_compares_within_groups_gives_it_exactly_zero(part: Estimator) -> None:
    assert part.estimate(rollouts([[True, True], [False, False], [True, True]]))[1].eq(0).all()


def test_a_session_has_the_reward_of_any_of_its_sequences() -> None:
    part = GAE(reward_scope="session")
    scored = [[False, False], [True, True], [True, True]]
    part.estimate(rollouts(scored, session_ids=torch.tensor([0, 0, 1])))
    with pytest.raises(CapabilityError, match="no scored reward"):
        part.estimate(rollouts(scored, session_ids=torch.tensor([0, 1, 2])))


def test_remax_compares_the_same_rewards_on_both_sides() -> None:
    found = ReMax().estimate(rollouts([[True, False], [True, True], [True, True]]))
    assert found[:, 0].tolist() == [0.0, 0.0, -1.0]


def test_greedy_rewards_are_numbers_where_they_count() -> None:
    """What a missing cell holds is ignored here too, and True is worth nothing until somebody says so."""
    columns = {"group_ids": torch.tensor([0, 1]), "layout": PaddedLayout(torch.ones(2, 1, dtype=torch.bool))}
    rewards, scored = torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([[True, False], [True, True]])
    greedy = torch.tensor([[0.5, math.nan], [0.5, 1.0]])
    data = Rollouts(rewards=rewards, scored=scored, greedy_rewards=greedy, **columns)
    assert ReMax().estimate(data)[:, 0].tolist() == [0.5, 3.5]
    assert ReMax(weights=(1.0, 2.0)).estimate(data)[:, 0].tolist() == [0.5, 5.5]
    with pytest.raises(NonFiniteError, match="greedy_rewards has 1 non-finite"):
        Rollouts(rewards=rewards, greedy_rewards=greedy, **columns)
    with pytest.raises(ShapeError, match="greedy_rewards has dtype torch.bool"):
        Rollouts(rewards=rewards, greedy_rewards=greedy > 0, **columns)
