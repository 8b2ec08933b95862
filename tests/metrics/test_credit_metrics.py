"""Metrics of groups, critic, advantages and lengths: true numbers, over any partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlobjectives import (
    GAE,
    GDPO,
    GRPO,
    RLOO,
    BatchBaseline,
    CapabilityError,
    Combined,
    FunctionEstimator,
    Minimum,
    PaddedLayout,
    ReMax,
    Rollouts,
    ShapeError,
    TDLambda,
    advantage_metrics,
    group_metrics,
    length_metrics,
    reward_metrics,
    value_metrics,
)
from rlobjectives.metrics import CREDIT_METRICS
from rlobjectives.metrics.advantages import ADVANTAGE_METRICS
from rlobjectives.metrics.values import ExplainedVariance
from tests.estimators.helpers import close, layout_of, rollouts_of


def report(stats):
    return {
        label: number.item()
        for name, stat in stats.items()
        if bool(stat.measured)
        for label, number in stat.report(name).items()
    }


def test_group_metrics_from_raw_rewards():
    mask = [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1]]
    found = report(
        group_metrics(rollouts_of(mask, [1.0, 0.0, 0.5, 2.0, 2.0], groups=[4, 4, 4, 8, 8]), dropped_groups=3)
    )
    baselines = [0.25, 0.75, 0.5, 2.0, 2.0]
    assert found == {
        "group/baseline_mean": pytest.approx(sum(baselines) / 5),
        "group/advantage_abs_mean": pytest.approx((0.75 + 0.75 + 0.0) / 5),
        "group/no_signal_token_fraction": pytest.approx(5 / 9),
        "group/empty_response_fraction": pytest.approx(1 / 5),
        "group/zero_advantage_fraction": pytest.approx(1 / 2),
        "group/dropped_fraction": pytest.approx(3 / 5),
    }


TWO = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
"""Two rewards whose plain sum is the same for both answers."""


@pytest.mark.parametrize(
    ("estimator", "distance", "dead"),
    [
        (None, 0.0, 1.0),
        (GRPO(), 0.0, 1.0),
        (GRPO(weights=(1.0, 0.5)), 0.5, 0.0),
        (GDPO(weights={"reward_1": 0.5, "reward_0": 1.0}), 0.5, 0.0),
        (Combined(estimators=(BatchBaseline(), RLOO(weights=(1.0, 0.5)))), 0.5, 0.0),
    ],
)
def test_groups_are_judged_as_the_estimator_sees_them(estimator, distance, dead):
    rollouts = Rollouts(rewards=TWO, group_ids=torch.tensor([3, 3]), layout=layout_of([[1, 1], [1, 0]]))
    found = report(group_metrics(rollouts, estimator))
    assert found["group/advantage_abs_mean"] == distance
    assert found["group/zero_advantage_fraction"] == found["group/no_signal_token_fraction"] == dead


@pytest.mark.parametrize("estimator", [GAE(), BatchBaseline(), TDLambda(), ReMax()])
def test_who_compares_no_siblings_has_no_numbers_of_groups(estimator):
    rollouts = Rollouts(rewards=TWO, group_ids=torch.tensor([3, 4]), layout=layout_of([[1, 1], [0, 0]]))
    assert report(group_metrics(rollouts, estimator)) == {"group/empty_response_fraction": 0.5}


def test_a_function_may_compare_siblings():
    centred = FunctionEstimator(function=lambda rollouts: rollouts.rewards[:, 0] - 0.5)
    rollouts = Rollouts(rewards=TWO, group_ids=torch.tensor([3, 3]), layout=layout_of([[1, 1], [1, 0]]))
    assert report(group_metrics(rollouts, centred))["group/zero_advantage_fraction"] == 0.0


def test_lengths_from_elsewhere_say_what_is_empty():
    rollouts = rollouts_of([[0, 0], [1, 0]], [1.0, 0.0], groups=[0, 0])
    found = report(group_metrics(rollouts, lengths=torch.tensor([2, 0])))
    assert found["group/empty_response_fraction"] == 0.5
    with pytest.raises(ShapeError, match="lengths"):
        group_metrics(rollouts, lengths=torch.tensor([2]))


def test_sequences_without_a_scored_sibling_have_no_baseline():
    scored = torch.tensor([True, True, False, True, False])
    rollouts = rollouts_of([[1]] * 5, [1.0, 0.0, 9.0, 5.0, 9.0], groups=[4, 4, 4, 8, 8], scored=scored)
    found = report(group_metrics(rollouts))
    assert found["group/baseline_mean"] == 0.5
    assert found["group/advantage_abs_mean"] == 1.0
    assert found["group/zero_advantage_fraction"] == 0.5


def test_nothing_is_reported_where_nothing_was_measured():
    found = report(group_metrics(rollouts_of([[0]], [1.0], groups=[1])))
    assert "group/baseline_mean" not in found
    assert "group/no_signal_token_fraction" not in found
    assert "group/dropped_fraction" not in found, "nobody said how many groups a filter took"
    with pytest.raises(CapabilityError, match="dropped_groups"):
        group_metrics(rollouts_of([[0]], [1.0]), dropped_groups=-1)


def test_constant_rewards_have_no_residue():
    assert (
        report(group_metrics(rollouts_of([[1]] * 3, [0.7] * 3, groups=[0] * 3)))["group/advantage_abs_mean"]
        == 0.0
    )


def test_explained_variance():
    target, mask = torch.tensor([[1.0, 2.0, 4.0, 9.0]]), torch.tensor([[True, True, True, False]])
    layout = PaddedLayout(mask)
    cases = {
        "perfect": (target, 1.0),
        "off by a constant": (target + 5.0, 1.0),
        "a constant": (torch.zeros_like(target), 0.0),
        "opposite": (-target, 1.0 - 4.0),
    }
    for prediction, expected in cases.values():
        assert report(value_metrics(prediction, target, layout))["value/explained_variance"] == pytest.approx(
            expected
        )
    garbage = torch.where(mask, target, torch.nan)
    assert report(value_metrics(garbage, garbage, layout)) == report(value_metrics(target, target, layout))
    assert "value/explained_variance" not in report(value_metrics(target, torch.ones_like(target), layout))


def test_explained_variance_over_any_partition():
    target, prediction = (torch.randn(97, dtype=torch.float64) + 1e4 for _ in range(2))
    whole = ExplainedVariance.between(target, prediction)
    parts = [
        ExplainedVariance.between(target[s], prediction[s])
        for s in (slice(0, 1), slice(1, 40), slice(40, 97))
    ]
    merged = parts[2].merge(ExplainedVariance.identity()).merge(parts[0]).merge(parts[1])
    assert merged.value.item() == pytest.approx(whole.value.item(), rel=1e-11)
    with pytest.raises(ShapeError, match="prediction"):
        ExplainedVariance.between(target, prediction[:5])
    tenths = torch.full((3,), 0.1, dtype=torch.float64)
    assert not ExplainedVariance.between(tenths, torch.rand(3)).measured, (
        "equal targets leave nothing to explain"
    )


def test_minimum_merges_and_reports_its_sign():
    found = (
        Minimum.of(torch.tensor([3.0, -2.0])).merge(Minimum.identity()).merge(Minimum.of(torch.tensor([5.0])))
    )
    assert report({"x": found}) == {"x": -2.0}
    assert report({"x": Minimum.of(torch.tensor([3.0]))}) == {"x": 3.0}
    assert report({"x": Minimum.identity()}) == {}


def test_advantage_metrics():
    layout = layout_of([[1, 1, 1], [1, 0, 0]])
    found = report(advantage_metrics(torch.tensor([[2.0, -1.0, 0.0], [-3.0, float("nan"), 9.0]]), layout))
    assert found == {
        "advantage/mean": -0.5,
        "advantage/std": pytest.approx((13.0 / 3.0) ** 0.5),
        "advantage/highest": 2.0,
        "advantage/lowest": -3.0,
        "advantage/abs_mean": 1.5,
        "advantage/positive_fraction": 0.25,
        "advantage/negative_fraction": 0.5,
        "advantage/zero_fraction": 0.25,
    }


def test_an_answer_is_correct_by_its_first_reward():
    """A well-formed wrong answer is not correct."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    scored = torch.tensor([[True, True], [True, True], [False, True]])
    rollouts = Rollouts(
        rewards=rewards,
        scored=scored,
        group_ids=torch.tensor([0, 0, 0]),
        layout=layout_of([[1, 0], [1, 1], [1, 1]]),
    )
    found: Any = length_metrics(rollouts)
    assert found["response/correct_length_"].mean.item() == 1.0
    assert found["response/incorrect_length_"].mean.item() == 2.0
    assert found["response/incorrect_length_"].count.item() == 1.0


def test_lengths_split_by_outcome():
    scored = torch.tensor([True, True, True, False])
    rollouts = rollouts_of([[1, 1, 1], [1, 1], [1], [1, 1, 1, 1]], [1.0, 0.0, 0.0, 1.0], scored=scored)
    found: Any = length_metrics(rollouts)
    close(found["response/length_"].mean, 2.5)
    close(found["response/length_max"].value, 4.0)
    close(found["response/correct_length_"].mean, 3.0)
    close(found["response/incorrect_length_"].mean, 1.5)
    found = length_metrics(
        rollouts, correct=torch.tensor([False, True, False, True]), lengths=torch.tensor([9, 8, 7, 6])
    )
    close(found["response/correct_length_"].mean, 8.0)
    close(found["response/incorrect_length_"].mean, 8.0)
    with pytest.raises(ShapeError, match="correct"):
        length_metrics(rollouts, correct=torch.tensor([1, 0, 0, 1]))
    with pytest.raises(ShapeError, match="lengths"):
        length_metrics(rollouts, lengths=torch.tensor([1]))


def test_dummy_rows_count_for_nothing():
    """Every number is that of the genuine rows alone: a dummy of a group, and a group of dummies."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 3.0, 2.0]), torch.tensor([0, 0, 2, 1, 1, 0, 2])
    mask = torch.tensor([[True], [True], [True], [False], [False], [True], [True]])
    flags = torch.tensor([True, True, True, False, False, False, False])
    padded = Rollouts(
        rewards=rewards, group_ids=groups, layout=PaddedLayout(mask & flags[:, None], sequence_mask=flags)
    )
    alone = Rollouts(rewards=rewards[:3], group_ids=groups[:3], layout=PaddedLayout(mask[:3]))
    for judge in (None, GRPO(on_singleton="zero"), BatchBaseline()):
        for metrics in (reward_metrics, group_metrics):
            assert report(metrics(padded, judge)) == report(metrics(alone, judge))
    assert report(length_metrics(padded)) == report(length_metrics(alone))
    assert report(reward_metrics(padded))["reward/singleton_fraction"] == 0.5
    found = report(group_metrics(padded, GRPO(on_singleton="zero"), dropped_groups=2))
    assert found["group/dropped_fraction"] == 0.5


def test_no_sequence_at_all():
    layout = PaddedLayout(torch.ones(0, 2, dtype=torch.bool))
    rollouts = Rollouts(rewards=torch.ones(0, 2), group_ids=torch.zeros(0, dtype=torch.int64), layout=layout)
    for judge in (None, GRPO(), BatchBaseline(), Combined(estimators=(BatchBaseline(), RLOO()))):
        assert not {**report(reward_metrics(rollouts, judge)), **report(group_metrics(rollouts, judge))}


def test_a_batch_baseline_has_no_constant_groups():
    """Two ranks of equal rewards each are no window of equal rewards."""
    rollouts = Rollouts(
        rewards=torch.tensor([1.0, 1.0]), group_ids=torch.tensor([0, 0]), layout=layout_of([[1], [1]])
    )
    assert "reward/constant_group_fraction" not in reward_metrics(rollouts, BatchBaseline())
    assert BatchBaseline().carries_signal(rollouts).tolist() == [True]


def test_an_estimate_that_is_known_is_not_made_again():
    calls = []

    def centred(rollouts):
        calls.append(1)
        return rollouts.rewards[:, 0] - rollouts.rewards[:, 0].mean()

    judge = FunctionEstimator(function=centred)
    rollouts = Rollouts(
        rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]), layout=layout_of([[1], [1]])
    )
    estimate = judge.estimate(rollouts)
    reward_metrics(rollouts, judge, estimate=estimate)
    group_metrics(rollouts, judge, estimate=estimate)
    assert len(calls) == 1


def test_every_metric_is_declared_with_its_kind():
    rollouts = rollouts_of([[1, 1]], [1.0])
    layout, ones = rollouts.layout, torch.ones(1, 2)
    found = {
        **group_metrics(rollouts, dropped_groups=0),
        **length_metrics(rollouts),
        **value_metrics(ones, ones, layout),
        **advantage_metrics(ones, layout),
    }
    assert {name: type(stat) for name, stat in found.items()} == {
        name: metric.kind for name, metric in {**CREDIT_METRICS, **ADVANTAGE_METRICS}.items()
    }
