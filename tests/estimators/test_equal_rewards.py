"""Which rewards are the same, in whatever precision they arrive: judged against exact rational arithmetic.

The oracle knows the decimals that were meant (`fractions`); the estimators see what was left of them in float64, float32
or bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlobjectives import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    BatchBaseline,
    Combined,
    MaxRL,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Rollouts,
    group_metrics,
    reward_metrics,
)
from rlobjectives.distributed import LOCAL
from tests.estimators.helpers import final

TENTHS = [[0.7, 0.3], [0.1, 0.9], [0.4, 0.6], [0.8, 0.2], [0.0, 1.0], [1.0, 0.0], [0.3, 0.7], [0.5, 0.5]]
"""Two rewards that were meant to add up to 1 in every answer."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
GRIDS = [Fraction(1, 10), Fraction(1, 20), Fraction(1, 8)]
GROUPED = [
    GRPO(),
    GRPO(baseline="leave_one_out"),
    GRPO(scale="none"),
    GRPO(scale="batch"),
    RLOO(),
    GPG(),
    OPO(),
    PassAtK(form="max_minus_second"),
    ReinforcePlusPlusBaseline(),
    Combined(estimators=(GRPO(), RLOO())),
]
"""Every group estimator that adds reward columns up."""
IN_WINDOW = [
    BatchBaseline(),
    BatchBaseline(scale="batch"),
    ReinforcePlusPlus(),
    ReinforcePlusPlus(discount=1.0),
]
"""Those that compare the sums of a window."""


def rollouts(
    rewards: Any, dtype: torch.dtype = torch.float64, groups: Any = None, **columns: Any
) -> Rollouts:
    table = torch.tensor(rewards, dtype=torch.float64).to(dtype)
    count = table.shape[0]
    return Rollouts(
        rewards=table,
        group_ids=torch.tensor(groups or [0] * count),
        layout=PaddedLayout(torch.ones(count, 2, dtype=torch.bool)),
        **columns,
    )


def first(estimate: torch.Tensor) -> torch.Tensor:
    return estimate if estimate.dim() == 1 else estimate[:, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "estimator", [*GROUPED, MaxRL(), PassAtK(threshold=1.0), GDPO(), GDPO(baseline="leave_one_out")]
)
def test_a_constant_sum_of_tenths(estimator: Any, dtype: torch.dtype) -> None:
    data = rollouts(TENTHS, dtype)
    assert not first(estimator.estimate(data)).any()
    assert estimator.carries_signal(data).tolist() == [False]
    assert reward_metrics(data, estimator)["reward/constant_group_fraction"].report("x")["x"] == 1.0
    assert group_metrics(data, estimator)["group/zero_advantage_fraction"].report("x")["x"] == 1.0
    assert not final(estimator, data).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("estimator", IN_WINDOW)
def test_a_window_of_one_sum(estimator: Any, dtype: torch.dtype) -> None:
    assert not final(estimator, rollouts(TENTHS, dtype, groups=list(range(8)))).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_greedy_answer_has_the_same_sum(dtype: torch.dtype) -> None:
    greedy = torch.tensor([[0.3, 0.7]] * 8, dtype=torch.float64).to(dtype)
    for estimator in (ReMax(), ReMax(normalize="window")):
        assert not final(estimator, rollouts(TENTHS, dtype, greedy_rewards=greedy)).any()
    # All lead by the same 0.25, but for rounding.
    quarter = torch.tensor([[0.05, 0.7], [0.7, 0.05]] * 4, dtype=torch.float64).to(dtype)
    assert not final(ReMax(normalize="window"), rollouts(TENTHS, dtype, greedy_rewards=quarter)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_returns_of_one_step_are_the_same(dtype: torch.dtype) -> None:
    columns = {name: torch.full((8, 2), -0.5) for name in ("old_logprobs", "squared_probs")}
    assert not OptimalTokenBaseline().estimate(rollouts(TENTHS, dtype, **columns)).any()


def test_copies_remember_the_precision() -> None:
    data = rollouts(TENTHS, torch.float32)
    assert data.rewards.dtype is torch.float64
    assert data.reward_dtype is torch.float32
    copy = dataclasses.replace(data, truncated=torch.zeros(8, dtype=torch.bool))
    assert copy.reward_dtype is torch.float32
    assert GRPO().carries_signal(copy).tolist() == [False]
    coarse = rollouts(TENTHS, torch.float32, reward_dtype=torch.bfloat16)
    assert dataclasses.replace(coarse).reward_dtype is torch.bfloat16
    assert rollouts([[1, 0], [0, 1]], torch.int64).reward_dtype is torch.int64


def test_what_a_reward_model_rounded_before() -> None:
    """A model in bfloat16 behind float32 tensors: the caller knows."""
    rounded = torch.tensor(TENTHS).bfloat16().float().tolist()
    assert RLOO().carries_signal(rollouts(rounded, torch.float32)).tolist() == [True]
    assert RLOO().carries_signal(rollouts(rounded, torch.float32, reward_dtype=torch.bfloat16)).tolist() == [
        False
    ]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [None, (1.0, 0.0), (0.0, 1.0), {"a": 2.0, "b": 0.0}])
def test_neighbours_in_a_single_column_differ(dtype: torch.dtype, weights: Any) -> None:
    """Nothing was added up, so nothing is rounding: also where the other columns say the same of everyone."""
    eps = torch.finfo(dtype).eps
    one, beside = 1.0 + eps, [0.3, 0.3]
    rewards = [[1.0, 1.0], [one, one]] if weights else [[1.0, beside[0]], [one, beside[1]]]
    if dtype is torch.float64 and not weights:
        rewards = [[1.0, 0.0], [one, 0.0]]  # 0.3 would swallow the last bit
    data = rollouts(rewards, dtype, reward_names=("a", "b"))
    for estimator in (
        GRPO(weights=weights),
        RLOO(weights=weights),
        PassAtK(form="max_minus_second", weights=weights),
    ):
        assert estimator.carries_signal(data).tolist() == [True]
    low, high = RLOO(weights=weights).estimate(data).tolist()
    assert high > low  # in float64 their mean is one of them


def test_one_scored_column_is_compared_exactly() -> None:
    scored = torch.tensor([[True, False], [True, False]])
    data = rollouts([[1.0, 5.0], [1.0078125, 9.0]], torch.bfloat16, scored=scored)
    assert GRPO().carries_signal(data).tolist() == [True]
    assert final(BatchBaseline(), data)[:, 0].tolist() == [-0.00390625, 0.00390625]


def test_a_real_spread_on_a_high_level_stays() -> None:
    for baseline in ("inclusive", "leave_one_out"):
        found = GRPO(scale="none", baseline=baseline).estimate(rollouts([[10000.0], [10000.005]]))
        assert found.tolist() == pytest.approx(
            [-0.0025, 0.0025] if baseline == "inclusive" else [-0.005, 0.005]
        )
    assert GRPO().carries_signal(rollouts([[10000.0, 0.5], [10000.005, 0.25]])).tolist() == [True]


def test_thresholds_are_compared_up_to_rounding() -> None:
    """0.7 + 0.3 is no more than 1, and 0.1 + 0.2 − 0.3 is nothing."""
    data = rollouts([[0.7, 0.3], [0.7, 0.4], [0.1, 0.2], [0.0, 0.2]], torch.float32)
    assert PassAtK(k=2, threshold=1.0).estimate(data).tolist() == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3])
    cancelled = rollouts([[0.1, 0.2, -0.3], [0.5, 0.5, 0.0]], torch.float32)
    assert GPG(count="nonzero").estimate(cancelled)[:, 2].tolist() == [0.0, 1.0]


GDPO_OTHERS = [[1.0, 1.0], [0.0, 0.2], [0.5, 0.1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_that_cancel_beside_another_group(dtype: torch.dtype) -> None:
    """A member at the mean has no rounding of its own: the bound is the group's. Nothing is left to whiten."""
    data = rollouts([*TENTHS[:3], *GDPO_OTHERS], dtype, groups=[0, 0, 0, 1, 1, 1])
    estimator = GDPO()
    estimate = estimator.estimate(data)
    assert estimate[:3, 0].tolist() == [0.0] * 3
    assert estimator.carries_signal(data).tolist() == [False, True]
    layout = PaddedLayout(torch.ones(5, 1, dtype=torch.bool))  # one of the other group is in another window
    window = Objective(estimator=estimator).freeze([(estimate[:5], layout)])
    assert window.advantages(estimate[:5], layout)[:3].flatten().tolist() == [0.0] * 3


def test_columns_without_spread_of_their_own_kill_no_signal() -> None:
    """A column that varies by its last bit proves nothing about the other's."""
    rewards = [[1.0, 1.0], [0.0, 1.0 + 2.0**-23], [1.0, 1.0], [0.0, 1.0]]
    assert GDPO(epsilon=0.0).carries_signal(rollouts(rewards, torch.float32)).tolist() == [True]


def test_estimators_that_cancel() -> None:
    """With two answers twice Dr.GRPO's centring is RLOO."""
    data = rollouts([[0.7], [0.1]])
    both = Combined(estimators=(GRPO(scale="none"), RLOO()), weights=(2.0, -1.0))
    assert both.carries_signal(data).tolist() == [False]
    assert not final(both, data).any()
    three = rollouts([[0.7], [0.1], [0.45]])
    thrice = Combined(estimators=(GRPO(scale="none"),) * 3, weights=(0.1, 0.2, -0.3))
    assert thrice.carries_signal(three).tolist() == [False]
    assert not final(thrice, three).any()


# Against exact arithmetic ---------------------------------------------------------------------------

numbers = st.integers(0, 20)


@st.composite
def tables(draw: Any, *, constant: bool) -> tuple[list[list[Fraction]], list[Fraction]]:
    """Rewards and weights as they were meant; in a constant group the last column makes up for the others."""
    size, count, grid = draw(st.integers(2, 16)), draw(st.integers(2, 4)), draw(st.sampled_from(GRIDS))
    weights = [draw(st.integers(1, 20)) * draw(st.sampled_from(GRIDS)) for _ in range(count)]
    table = [[draw(numbers) * grid for _ in range(count)] for _ in range(size)]
    if constant:
        total = draw(numbers) * grid
        for row in table:
            row[-1] = (total - sum(w * r for w, r in zip(weights[:-1], row, strict=False))) / weights[-1]
    return table, weights


def seen(table: list[list[Fraction]], dtype: torch.dtype) -> Rollouts:
    return rollouts([[float(one) for one in row] for row in table], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40)
@given(tables(constant=True))
def test_constant_in_exact_arithmetic_is_exactly_zero(dtype: torch.dtype, drawn: Any) -> None:
    table, exact = drawn
    data, weights = seen(table, dtype), tuple(map(float, exact))
    for plain in GROUPED[:-1]:
        estimator = dataclasses.replace(plain, weights=weights)
        estimate = estimator.estimate(data)
        assert not first(estimate).any(), estimator
        assert estimator.carries_signal(data, estimate).tolist() == [False]
        assert (
            reward_metrics(data, estimator, estimate=estimate)["reward/constant_group_fraction"].report("x")[
                "x"
            ]
            == 1.0
        )
    for plain in IN_WINDOW:
        assert not final(dataclasses.replace(plain, weights=weights), data).any(), plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40)
@given(tables(constant=False))
def test_a_difference_above_rounding_is_kept(dtype: torch.dtype, drawn: Any) -> None:
    table, exact = drawn
    sums = [sum(w * r for w, r in zip(exact, row, strict=True)) for row in table]
    sizes = [sum(abs(w * r) for w, r in zip(exact, row, strict=True)) for row in table]
    error = 2 * torch.finfo(dtype).eps * float(max(sizes))
    assume(float(max(sums) - min(sums)) > error)
    data, weights = seen(table, dtype), tuple(map(float, exact))
    mean, count = sum(sums) / len(sums), len(sums)
    expected = [float(one - mean) for one in sums]
    found = GRPO(scale="none", weights=weights).estimate(data).tolist()
    assert found == pytest.approx(expected, abs=error)
    assert all(a * e > 0 for a, e in zip(found, expected, strict=True) if abs(e) > error)
    leave_one_out = [e * count / (count - 1) for e in expected]
    assert RLOO(weights=weights).estimate(data).tolist() == pytest.approx(leave_one_out, abs=2 * error)
    spread = math.sqrt(sum(e * e for e in expected) / (count - 1))
    if spread > 8 * error:
        scaled = GRPO(weights=weights, epsilon=0.0).estimate(data).tolist()
        assert scaled == pytest.approx([e / spread for e in expected], abs=4 * error / spread)
    for estimator in (GRPO(weights=weights), RLOO(weights=weights)):
        assert estimator.carries_signal(data).tolist() == [True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40)
@given(st.sampled_from(GRIDS), st.lists(numbers, min_size=2, max_size=16), st.integers(1, 20))
def test_gdpo_columns_that_mirror_each_other(
    dtype: torch.dtype, grid: Fraction, drawn: list[int], weight: int
) -> None:
    """z of 2 − r is −z of r in exact arithmetic, whatever the common weight."""
    assume(len(set(drawn)) > 1)
    table = [[number * grid, 20 * grid - number * grid] for number in drawn]
    for baseline in ("inclusive", "leave_one_out"):
        estimator = GDPO(weights=(weight / 10, weight / 10), baseline=baseline)
        data = seen(table, dtype)
        assert estimator.estimate(data)[:, 0].tolist() == [0.0] * len(drawn)
        assert estimator.carries_signal(data).tolist() == [False]


def test_a_reward_that_counts_alone_meets_a_threshold_exactly() -> None:
    data = Rollouts(
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.bfloat16), group_ids=torch.zeros(4).long()
    )
    expected = PassAtK(k=2, threshold=0.5).estimate(data)
    assert expected.any()
    assert torch.equal(PassAtK(k=2, threshold=0.999).estimate(data), expected)


def test_what_rounding_did_to_a_sum_does_not_depend_on_the_groups() -> None:
    """Each sequence is scored in one column alone, so nothing was added up in any of them."""
    for ids in ([0, 0], [0, 1]):
        data = Rollouts(
            rewards=torch.tensor([[0.7, 0.0], [0.0, 0.3]]),
            scored=torch.tensor([[True, False], [False, True]]),
            group_ids=torch.tensor(ids),
        )
        assert BatchBaseline().estimate(data)[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sum_of_estimators_repairs_nothing(bad: float) -> None:
    class Broken(GRPO):
        def finalize(self, estimate: Any, layout: Any, context: Any) -> torch.Tensor:
            return torch.full_like(super().finalize(estimate, layout, context), bad)

    objective = Objective(estimator=Combined(estimators=(Broken(), GRPO())))
    data, layout = (
        Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0])),
        PaddedLayout(torch.ones(2, 1).bool()),
    )
    estimate = objective.estimator.estimate(data)
    window = objective.freeze([(estimate, layout)], LOCAL)
    assert not window.advantages(estimate, layout).isfinite().any()
