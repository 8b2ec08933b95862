"""Comparisons over a window with fewer than two samples: refused at set-up, and otherwise reported when it opens."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from rlobjectives import (
    GAE,
    GDPO,
    GRPO,
    OPO,
    RLOO,
    BatchBaseline,
    CapabilityError,
    Combined,
    Objective,
    PaddedLayout,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Rollouts,
    TrainerFacts,
)
from rlobjectives.testing.simulate import run_ranks_as_threads

COMPARING = [
    GDPO(),
    GDPO(whiten_unit="token"),
    GRPO(scale="batch"),
    BatchBaseline(),
    BatchBaseline(scale="batch"),
    ReinforcePlusPlus(),
    ReinforcePlusPlusBaseline(),
    ReMax(normalize="window"),
    Combined(estimators=(GRPO(), ReinforcePlusPlusBaseline())),
]
"""Estimators for which a lone sequence has nobody to be compared with."""
ALONE = [
    GDPO(whiten_unit="none"),
    GRPO(),
    RLOO(),
    ReinforcePlusPlus(normalize="none"),
    ReinforcePlusPlus(discount=0.9),
    ReinforcePlusPlusBaseline(normalize="none"),
    ReMax(),
    Combined(estimators=(GRPO(), RLOO())),
]
ONE = PaddedLayout(torch.ones(1, 3, dtype=torch.bool))
DATA = Rollouts(
    rewards=torch.tensor([[0.5, 1.0], [0.0, 0.0]], dtype=torch.float64),
    greedy_rewards=torch.zeros(2, 2),
    group_ids=torch.tensor([0, 0]),
    layout=PaddedLayout(torch.ones(2, 3, dtype=torch.bool)),
)


def parts(estimator: Any) -> tuple[Objective, torch.Tensor]:
    objective = Objective(estimator=estimator)
    return objective, estimator.estimate(DATA)


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_trainer_with_one_sequence_a_step_is_refused(estimator: Any) -> None:
    objective = Objective(estimator=estimator)
    settings = "per_device_train_batch_size × gradient_accumulation_steps × ranks"
    facts = TrainerFacts(window_sequences=1, window_settings=settings)
    with pytest.raises(
        CapabilityError, match="a step here has 1: every advantage would be 0.*per_device_train_batch"
    ):
        objective.check(facts)
    objective.check(TrainerFacts(window_sequences=2, window_settings=settings))
    objective.check(TrainerFacts())


@pytest.mark.parametrize("estimator", ALONE)
def test_who_compares_nobody_over_the_window_is_not(estimator: Any) -> None:
    Objective(estimator=estimator).check(TrainerFacts(window_sequences=1))
    objective, estimate = parts(estimator)
    objective.freeze([(estimate[:1], ONE)])  # pytest makes a warning an error


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_window_of_one_sequence_is_reported(estimator: Any) -> None:
    objective, estimate = parts(estimator)
    with pytest.warns(UserWarning, match=f"{type(estimator).__name__} compares .* fewer than two that count"):
        objective.freeze([(estimate[:1], ONE)])
    two = DATA.layout
    assert two is not None
    objective.freeze([(estimate, two)])


@pytest.mark.parametrize("estimator", COMPARING)
def test_what_was_dropped_does_not_count(estimator: Any) -> None:
    """A legitimate step of a long run: reported, no error; and nothing at all where nothing is left."""
    objective, estimate = parts(estimator)
    for kept, reported in (([True, False], True), ([False, False], False)):
        mask = torch.tensor(kept)
        layout = PaddedLayout(mask.unsqueeze(1).expand(2, 3).contiguous(), sequence_mask=mask)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            window = objective.freeze([(estimate, layout)])
        assert bool(found) == reported
        advantages = window.advantages(estimate, layout)
        assert not advantages[~mask].any()


def test_gae_over_a_single_token() -> None:
    values = torch.tensor([[0.25, 0.5, 0.0], [0.0, 0.0, 0.0]])
    estimator = GAE(normalize="window")
    objective = Objective(estimator=estimator)
    objective.check(TrainerFacts(window_sequences=1, offers={"values": True}))  # its tokens differ
    data = Rollouts(rewards=DATA.rewards, group_ids=DATA.group_ids, layout=DATA.layout, values=values)
    estimate = estimator.estimate(data)[:1]
    objective.freeze([(estimate, ONE)])
    with pytest.warns(UserWarning, match="fewer than two"):
        objective.freeze([(estimate[:, :1], PaddedLayout(torch.ones(1, 1, dtype=torch.bool)))])


def test_all_ranks_report_it_and_count_together() -> None:
    objective, estimate = parts(GDPO())

    def few(communicator: Any, *rows: slice) -> bool:
        mine = estimate[rows[communicator.rank]]
        pairs = [(mine, PaddedLayout(torch.ones(len(mine), 3, dtype=torch.bool)))] if len(mine) else []
        found = objective.estimator.few_samples(objective.freeze(pairs, communicator).context("estimator"))
        return bool(found)

    one_each = run_ranks_as_threads(lambda ranks: few(ranks, slice(0, 1), slice(1, 2)), 2)
    with warnings.catch_warnings():  # a process has one list of warnings, which its threads share
        warnings.simplefilter("ignore")
        one_in_all = run_ranks_as_threads(lambda ranks: few(ranks, slice(0, 1), slice(0, 0)), 2)
    assert (one_each, one_in_all) == ([False, False], [True, True])


@pytest.mark.parametrize(
    "estimator",
    [RLOO(), OPO(), PassAtK(), PassAtK(form="max_minus_second"), Combined(estimators=(GRPO(), RLOO()))],
)
def test_a_scale_that_is_part_of_the_definition_is_not_whitened(estimator: Any) -> None:
    with pytest.raises(CapabilityError, match="normalize_advantages would rescale them"):
        Objective(estimator=estimator).check(TrainerFacts(normalize_advantages=True))


def test_own_estimators_leave_out_what_does_not_count() -> None:
    """Dummies, unscored answers and groups of nothing else: no row, and no 0/0."""
    mask = torch.tensor([True, True, True, True, False, False, True])
    scored = torch.tensor([[True]] * 3 + [[False]] + [[True]] * 2 + [[False]])
    rewards = torch.tensor([1.0, 0.0, 0.5, 7.0, 5.0, 5.0, 3.0])
    data = Rollouts(
        rewards=rewards,
        scored=scored,
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2, 3]),
        layout=PaddedLayout(mask.unsqueeze(1), sequence_mask=mask),
    )
    assert data.counted.tolist() == [True, True, True, False, False, False, False]
    assert data.group_mean(rewards).tolist() == [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert data.groups.sizes.tolist() == [2, 2, 0, 1]
    garbage = torch.where(data.counted, rewards, torch.nan)
    assert data.group_mean(garbage).tolist() == data.group_mean(rewards).tolist()
