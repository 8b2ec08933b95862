"""GRPO, Dr.GRPO's centring, GDPO and RLOO: published numbers, plain-Python oracles, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import (
    GDPO,
    GRPO,
    RLOO,
    CapabilityError,
    Combined,
    NonFiniteError,
    Objective,
    PackedLayout,
    PaddedLayout,
    Rollouts,
    ShapeError,
    TeacherSignal,
    TrainerFacts,
    reward_matrix,
)
from rlobjectives.functional import grpo_estimate, whiten
from rlobjectives.statistics import Moments
from rlobjectives.testing.cases import draw_case
from tests.oracles import normalised as oracle

GROUP = [1.0, 0.0, 0.5, 0.0]


def rollouts(rewards: Any, ids: list[int] | None = None, **columns: Any) -> Rollouts:
    table = torch.tensor(rewards, dtype=torch.float64) if isinstance(rewards, list) else rewards
    return Rollouts(rewards=table, group_ids=torch.tensor(ids or [0] * len(table)), **columns)


def advantages(estimator: Any, data: Rollouts, lengths: list[int] | None = None) -> list[float]:
    """Final advantages, as a window gives them to the first token of each sequence."""
    lengths = lengths or [1] * data.num_sequences
    mask = torch.arange(max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    layout = PaddedLayout(mask)
    estimate = estimator.estimate(data)
    window = Objective(estimator=estimator).freeze([(estimate, layout)])
    return window.advantages(estimate, layout)[:, 0].tolist()


def close(found: Any, expected: Any, tolerance: float = 1e-11) -> bool:
    return found == pytest.approx(expected, rel=0.0, abs=tolerance)


class TestPublishedNumbers:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, [1.305579692401, -0.78334781544, 0.26111593848, -0.78334781544]),
            ({"epsilon": 1e-4}, [1.305309749354, -0.783185849612, 0.261061949871, -0.783185849612]),
            ({"epsilon": 1e-8}, [1.305582392395, -0.783349435437, 0.261116478479, -0.783349435437]),
            ({"ddof": 0}, [1.507553086534, -0.90453185192, 0.301510617307, -0.90453185192]),
            ({"scale": "none"}, [0.625, -0.375, 0.125, -0.375]),
            (
                {"baseline": "leave_one_out"},
                [2.886741345983, -0.999998000004, 0.288674634596, -0.999998000004],
            ),
        ],
    )
    def test_grpo(self, options: dict[str, Any], expected: list[float]) -> None:
        assert close(advantages(GRPO(**options), rollouts(GROUP)), expected)

    def test_grpo_over_the_batch(self) -> None:
        data = rollouts([*GROUP, 0.0, 0.0, 1.0, 0.0], [0] * 4 + [1] * 4)
        expected = [1.364144249949, -0.818486549969, 0.27282884999, -0.818486549969]
        expected += [-0.545657699979, -0.545657699979, 1.636973099938, -0.545657699979]
        assert close(advantages(GRPO(scale="batch", epsilon=1e-4), data), expected)

    def test_two_completions_lose_the_magnitude(self) -> None:
        for reward in (1e-3, 1.0, 50.0):
            found = advantages(GRPO(epsilon=0.0), rollouts([reward, 0.0]))
            assert close(found, [math.sqrt(0.5), -math.sqrt(0.5)])

    def test_rloo(self) -> None:
        expected = [0.833333333333, -0.5, 0.166666666667, -0.5]
        assert close(advantages(RLOO(), rollouts(GROUP)), expected)

    CORRECT = (1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
    FORMAT = (1.0, 1.0, 0.0, 0.0, 0.5, 0.25, 0.75, 1.0)
    IDS = (0, 0, 0, 0, 1, 1, 1, 1)
    LENGTHS = (3, 1, 2, 2, 4, 1, 2, 3)

    @pytest.mark.parametrize(
        ("options", "sums", "expected"),
        [
            (
                {},
                [1.731750859521, 0, 0, -1.731750859521, 0.478697057971, -0.295659685609]
                + [-0.478697057971, 0.295659685609],
                [1.779092624427, 0, 0, -1.779092624427, 0.49178344592, -0.303742286666]
                + [-0.49178344592, 0.303742286666],
            ),
            (
                {"weights": (2.0, 0.5)},
                [2.164688574402, -1.298813144641, 1.298813144641, -2.164688574402]
                + [1.538161673626, 1.150983301837, -1.538161673626, -1.150983301837],
                [1.276525205007, -0.765915123004, 0.765915123004, -1.276525205007]
                + [0.907059874099, 0.678739294285, -0.907059874099, -0.678739294285],
            ),
            (
                {"epsilon": 1e-6, "whiten_unit": "token", "whiten_mode": "variance", "whiten_epsilon": 1e-8},
                None,
                [1.591148730038, -0.187159642294, -0.187159642294, -1.965468014626]
                + [0.304353246634, -0.490929347843, -0.678672531221, 0.116610063256],
            ),
        ],
    )
    def test_gdpo(self, options: dict[str, Any], sums: list[float] | None, expected: list[float]) -> None:
        table = torch.tensor([self.CORRECT, self.FORMAT]).double().T
        data = rollouts(table, list(self.IDS))
        if sums is not None:
            assert close(GDPO(**options).estimate(data)[:, 0].tolist(), sums)
        assert close(advantages(GDPO(**options), data, list(self.LENGTHS)), expected)

    def test_gdpo_whitening_divides_by_the_std_of_the_sums(self) -> None:
        data = rollouts(torch.tensor([self.CORRECT, self.FORMAT]).double().T, list(self.IDS))
        moments = Moments.of(GDPO().estimate(data)[:, 0])
        assert abs(float(moments.mean)) < 1e-15
        assert float(moments.std(ddof=1)) == pytest.approx(0.973289938076, abs=1e-12)

    def test_gdpo_with_a_collapsed_reward_keeps_the_other(self) -> None:
        table = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]]).double().T
        expected = [0.865875429761, -0.865875429761, 0.865875429761, -0.865875429761]
        assert close(GDPO().estimate(rollouts(table))[:, 0].tolist(), expected)

    def test_gdpo_of_opposed_rewards_leaves_the_difference_of_the_weights(self) -> None:
        table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        found = GDPO(weights=(1.0, 0.5)).estimate(rollouts(table))[:, 0].tolist()
        assert close(found, [0.353503397663, -0.353503397663])

    def test_whitening_windows_apart_and_together(self) -> None:
        def white(*numbers: float) -> list[float]:
            values = torch.tensor(numbers, dtype=torch.float64)
            return whiten(values, Moments.of(values), ddof=1, epsilon=1e-4).tolist()

        assert close(white(0.1, 0.2, 0.3), [-0.999000999001, 0.0, 0.999000999001])
        assert close(white(5, 5.1, 5.3), [-0.872300506216, -0.218075126554, 1.09037563277])
        merged = [-0.948977996957, -0.912004828245, -0.875031659532, 0.862707269961, 0.899680438674]
        assert close(white(0.1, 0.2, 0.3, 5, 5.1, 5.3), [*merged, 0.973626776099])


OPTIONS = {
    "scale": ("group", "batch", "none"),
    "baseline": ("inclusive", "leave_one_out"),
    "mode": ("add", "clamp"),
    "ddof": (0, 1),
    "epsilon": (1e-6, 1e-2),
}


class TestOracles:
    @settings(max_examples=60)
    @given(data=st.data())
    def test_grpo_and_rloo(self, data: st.DataObject) -> None:
        case = self.draw(data)
        options = {name: data.draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
        weights = data.draw(st.sampled_from(((1.0, 1.0), (1.0, -0.5), (0.0, 3.0))))
        table, flags, ids = case.rewards.tolist(), case.scored.tolist(), case.group_ids.tolist()
        named = {("epsilon_mode" if name == "mode" else name): value for name, value in options.items()}
        part = GRPO(weights=weights, **named)
        estimate = part.estimate(case.rollouts())
        layout = PaddedLayout(torch.ones(case.count, 1, dtype=torch.bool))
        window = Objective(estimator=part).freeze([(estimate, layout)])
        expected = oracle.grpo(table, flags, ids, weights, **options)
        found = window.advantages(estimate, layout).flatten().tolist()
        assert close(found, expected, 1e-10 * max(1.0, *map(abs, expected)))
        expected = oracle.rloo(table, flags, ids, weights)
        found = RLOO(weights=weights).estimate(case.rollouts()).tolist()
        assert close(found, expected, 1e-12 * max(1.0, *map(abs, expected)))

    @settings(max_examples=60)
    @given(data=st.data())
    def test_gdpo(self, data: st.DataObject) -> None:
        case = self.draw(data)
        options = {
            "baseline": data.draw(st.sampled_from(("inclusive", "leave_one_out"))),
            "unit": data.draw(st.sampled_from(("sample", "token", "none"))),
            "mode": data.draw(st.sampled_from(("add", "variance", "floor"))),
            "epsilon": data.draw(st.sampled_from((1e-4, 1e-2))),
        }
        weights = data.draw(st.sampled_from(((1.0, 1.0), (1.0, -0.5), (0.0, 3.0))))
        lengths = data.draw(st.lists(st.integers(1, 4), min_size=case.count, max_size=case.count))
        names = {"unit": "whiten_unit", "mode": "whiten_mode"}
        part = GDPO(weights=weights, **{names.get(name, name): value for name, value in options.items()})
        expected = oracle.gdpo(
            case.rewards.tolist(),
            case.scored.tolist(),
            case.group_ids.tolist(),
            weights,
            lengths=lengths,
            **options,
        )
        found = advantages(part, case.rollouts(), lengths)
        assert close(found, expected, 1e-10 * max(1.0, *map(abs, expected)))

    def draw(self, data: st.DataObject) -> Any:
        return draw_case(
            data.draw(st.integers(0, 2**20)),
            tuple(data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))),
            rewards=data.draw(st.sampled_from(("binary", "normal", "heavy"))),
            unscored=data.draw(st.sampled_from((0.0, 0.3))),
        )


def left_out(rewards: list[float], ddof: int = 1, epsilon: float = 1e-6) -> list[float]:
    """Each against the mean and spread of the others, written out, with sums that do not round."""
    found = []
    for place, reward in enumerate(rewards):
        others = rewards[:place] + rewards[place + 1 :]
        mean = math.fsum(others) / len(others)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in others) / max(len(others) - ddof, 1))
        found.append((reward - mean) / (1.0 if min(others) == max(others) else spread + epsilon))
    return found


class TestLeaveOneOut:
    @pytest.mark.parametrize("far", [1e5, 1e6, 1e7, -1e7, 1e12])
    @pytest.mark.parametrize("place", [0, 2, 3])
    def test_an_outlier_meets_the_spread_of_the_others(self, far: float, place: int) -> None:
        group = [1.0, 1.01, 1.02]
        group.insert(place, far)
        found = advantages(GRPO(baseline="leave_one_out"), rollouts(group))
        assert found[place] == pytest.approx((far - 1.01) / (0.01 + 1e-6), rel=1e-9)
        assert found == pytest.approx(left_out(group), rel=1e-9)

    def test_an_outlier_in_plain_numbers(self) -> None:
        part = GRPO(baseline="leave_one_out")
        for far, expected in ((1e5, 9.999e6), (1e6, 9.999e7), (1e7, 9.999e8)):
            assert advantages(part, rollouts([far, 1.0, 1.01, 1.02]))[0] == pytest.approx(expected, rel=1e-4)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.lists(
                st.one_of(
                    st.floats(-2.0, 2.0, width=16), st.sampled_from((0.0, 1.0, -1e7, 1e7, 3e5, 1e3 + 1e-3))
                ),
                min_size=2,
                max_size=9,
            ),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from((0, 1)),
        st.randoms(use_true_random=False),
    )
    def test_any_groups_in_any_order(self, groups: list[list[float]], ddof: int, dice: Any) -> None:
        """Ties at the far end, several outliers, interleaved groups, and siblings without a score."""
        cells = [
            (reward, expected, number, True)
            for number, group in enumerate(groups)
            for reward, expected in zip(group, left_out(group, ddof), strict=True)
        ]
        cells += [(1e9, 0.0, number, False) for number in range(len(groups))]
        dice.shuffle(cells)
        data = rollouts(
            [[cell[0]] for cell in cells],
            [cell[2] for cell in cells],
            scored=torch.tensor([[cell[3]] for cell in cells]),
        )
        found = GRPO(baseline="leave_one_out", ddof=ddof).estimate(data).tolist()
        assert found == pytest.approx([cell[1] for cell in cells], rel=1e-9, abs=1e-12)


class TestDegenerateGroups:
    def test_others_without_spread_leave_the_difference(self) -> None:
        """One success among failures has no leave-one-out spread; dividing by ε would give a million."""
        for numbers in ([1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1], [0.2, 0.9, 0.9]):
            found = advantages(GRPO(baseline="leave_one_out"), rollouts(numbers))
            assert found[0] == pytest.approx(numbers[0] - numbers[1], abs=1e-15)
            assert max(map(abs, found)) < 10.0

    def test_a_window_without_spread_is_zero_without_any_epsilon(self) -> None:
        for part in (GRPO(scale="batch", epsilon=0.0), GRPO(epsilon=0.0), RLOO()):
            assert advantages(part, rollouts([0.3] * 4)) == [0.0] * 4
        part = GDPO(epsilon=0.0, whiten_epsilon=0.0)
        assert advantages(part, rollouts(torch.full((4, 2), 0.3, dtype=torch.float64))) == [0.0] * 4

    def test_columns_that_cancel_are_no_signal(self) -> None:
        table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        part, data = GDPO(), rollouts(table)
        assert part.estimate(data)[:, 0].tolist() == [0.0] * 3
        assert part.carries_signal(data).tolist() == [False]
        assert advantages(part, data) == [0.0] * 3

    def test_signal_is_judged_on_the_combined_advantage(self) -> None:
        table = torch.tensor([[1.0, 5.0], [1.0, 6.0], [0.0, 1.0], [1.0, 1.0]])
        data = rollouts(table, [0, 0, 1, 1])
        assert GDPO(weights=(1.0, 0.0)).carries_signal(data).tolist() == [False, True]
        assert GDPO(weights=(0.0, 1.0)).carries_signal(data).tolist() == [True, False]

    def test_large_equal_rewards_differ_by_what_float64_can_tell(self) -> None:
        near = [10000.0, 10000.005, 10000.010, 10000.015]
        assert close(advantages(GRPO(epsilon=0.0), rollouts(near))[0], -1.1618950038622, 1e-8)

    def test_a_weight_beyond_float32_does_not_make_a_constant_group(self) -> None:
        """Two different rewards whose weighted values overflow to the same infinity are not equal."""
        estimate = GRPO(weights=(1e300, 1.0)).estimate(rollouts(torch.tensor([[1e30, 0.0], [2e30, 0.0]])))
        assert not torch.isfinite(estimate).any()

    def test_scale_is_lost_only_to_epsilon(self) -> None:
        """An added ε damps a reward whose spread is near it: 7 % at 1e-3 and ε = 1e-4."""
        tiny = rollouts([1e-3 * (k % 2) for k in range(4)])
        wide = rollouts([float(k % 2) for k in range(4)])
        damped = advantages(GRPO(epsilon=1e-4), tiny)[1] / advantages(GRPO(epsilon=1e-4), wide)[1]
        assert damped == pytest.approx(0.8525, abs=2e-3)
        assert advantages(GRPO(epsilon=0.0), tiny) == pytest.approx(
            advantages(GRPO(epsilon=0.0), wide), abs=1e-13
        )

    @pytest.mark.parametrize("part", [GRPO(), RLOO(), GDPO()], ids=lambda part: type(part).__name__)
    def test_a_singleton_is_refused_with_its_id(self, part: Any) -> None:
        data = rollouts(torch.rand(3, 2), [4, 9, 4])
        with pytest.raises(CapabilityError, match=r"1 of 2 groups have a single completion \(group_ids 9\)"):
            part.estimate(data)
        lenient = type(part)(on_singleton="zero").estimate(data)
        assert float(lenient.reshape(3, -1)[1, 0]) == 0.0

    def test_a_group_with_one_scored_member_is_zero(self) -> None:
        scored = torch.tensor([True, False, False, True, True])
        data = rollouts([5.0, 1.0, 2.0, 1.0, 0.0], [0, 0, 0, 1, 1], scored=scored)
        for part in (GRPO(), RLOO()):
            assert part.estimate(data)[:3].tolist() == [0.0] * 3

    def test_no_sequences_at_all(self) -> None:
        data = Rollouts(rewards=torch.zeros(0, 2), group_ids=torch.zeros(0, dtype=torch.long))
        for part in (GRPO(), RLOO(), GDPO()):
            assert part.estimate(data).shape[0] == 0
            assert part.carries_signal(data).tolist() == []


class TestRefusals:
    @pytest.mark.parametrize(
        "weights",
        [
            (1.0,),
            (0.0, 0.0),
            (1.0, float("nan")),
            (1.0, float("inf")),
            (1.0, 1e-50),
            (1.0, 1e300),
            (16777216.0, 16777217.0),
            (1.0, True),
            (1.0, "2"),
            {"a": 0.0, "b": 0.0},
        ],
        ids=repr,
    )
    def test_gdpo_weights(self, weights: Any) -> None:
        with pytest.raises(CapabilityError, match="weights"):
            GDPO(weights=weights)

    @pytest.mark.parametrize(
        "options",
        [
            {"epsilon": -1.0},
            {"epsilon": float("nan")},
            {"epsilon": True},
            {"epsilon": 10**400},
            {"whiten_epsilon": float("inf")},
            {"whiten_unit": "batch"},
            {"whiten_mode": "clamp"},
            {"baseline": "mean"},
            {"on_singleton": "raw"},
        ],
        ids=repr,
    )
    def test_gdpo_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(CapabilityError, match=next(iter(options))):
            GDPO(**options)

    @pytest.mark.parametrize(
        "options",
        [{"scale": "std"}, {"baseline": 1}, {"ddof": 2}, {"epsilon_mode": "max"}, {"weights": ("x",)}],
    )
    def test_grpo_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(CapabilityError, match=next(iter(options))):
            GRPO(**options)

    def test_weights_that_do_not_match_the_rewards(self) -> None:
        data = rollouts(torch.rand(2, 3))
        with pytest.raises(CapabilityError, match="2 weights for 3 rewards"):
            GDPO(weights=(1.0, 2.0)).estimate(data)
        with pytest.raises(CapabilityError, match="2 weights for 3 rewards"):
            GRPO(weights=(1.0, 2.0)).estimate(data)
        with pytest.raises(CapabilityError, match=r"weights for \['x', 'y', 'z'\]; the rewards are"):
            GDPO(weights={"x": 1.0, "y": 1.0, "z": 1.0}).estimate(data)
        with pytest.raises(CapabilityError, match="at least 2 rewards; rewards has 1"):
            GDPO().estimate(rollouts(GROUP))

    def test_weights_by_name_follow_the_names(self) -> None:
        table = torch.tensor([[1.0, 0.3], [0.0, 0.1], [0.5, 0.9]])
        data = rollouts(table, reward_names=("right", "short"))
        by_name = GDPO(weights={"short": 0.25, "right": 2.0}).estimate(data)
        assert torch.equal(by_name, GDPO(weights=(2.0, 0.25)).estimate(data))

    def test_rewards_must_be_numbers_within_float32(self) -> None:
        for bad in (float("nan"), float("inf"), 1e300, 3.5e38):
            with pytest.raises(NonFiniteError, match=r"rewards has 1 values .* in: reward_1"):
                rollouts(torch.tensor([[0.0, 1.0], [1.0, bad]], dtype=torch.float64))
        assert rollouts([3.4e38, -3.4e38]).rewards.tolist() == [[3.4e38], [-3.4e38]]
        with pytest.raises(ShapeError, match=r"torch\.bool"):
            rollouts(torch.tensor([True, False]))
        with pytest.raises(ShapeError, match="different names"):
            rollouts(torch.rand(2, 2), reward_names=("a", "a"))

    def test_reward_functions_may_return_numpy_but_not_booleans(self) -> None:
        found, scored, names = reward_matrix({"a": [numpy.float32(0.5), 1], "b": [None, numpy.nan]})
        assert found.tolist() == [[0.5, 0.0], [1.0, 0.0]]
        assert (scored.tolist(), names) == ([[True, False], [True, False]], ("a", "b"))
        for bad in (True, numpy.bool_(True), "1", [1.0], {}, 1j):
            with pytest.raises(ShapeError, match="reward 'a' gave"):
                reward_matrix({"a": [bad]})
        with pytest.raises(ShapeError, match="lengths"):
            reward_matrix({"a": [1.0], "b": []})

    def test_trainer_facts(self) -> None:
        def reasons(part: Any, **facts: Any) -> str:
            with pytest.raises(CapabilityError) as caught:
                Objective(estimator=part).check(TrainerFacts(**facts))
            return str(caught.value)

        assert "num_generations is 1" in reasons(GDPO(), num_generations=1)
        assert "normalize_advantages" in reasons(GDPO(), normalize_advantages=True)
        assert "normalize_advantages" in reasons(GRPO(scale="none"), normalize_advantages=True)
        assert "there is 1" in reasons(GDPO(), num_rewards=1)
        assert "2 weights for 3 rewards" in reasons(GDPO(weights=(1.0, 2.0)), num_rewards=3)
        assert "one optimizer step" in reasons(GRPO(scale="batch"), whole_groups_per_window=False)
        Objective(estimator=GRPO()).check(TrainerFacts(normalize_advantages=True, num_generations=2))


def test_combined_refuses_to_lose_a_sequence_without_positions() -> None:
    """Estimated while padded, packed for the window: the empty answer's reward would leave the statistics."""
    part = Combined(estimators=(GRPO(scale="batch"), TeacherSignal(coef=0.5)))
    logprobs = torch.zeros(2, 1, dtype=torch.float64)
    padded = PaddedLayout(torch.tensor([[True], [False]]))
    found = part.estimate(
        rollouts([1.0, 0.0], layout=padded, old_logprobs=logprobs, teacher_logprobs=logprobs)
    )
    packed = PackedLayout(torch.tensor([0, 1, 1]), torch.tensor([True]))
    Objective(estimator=part).freeze([(found, padded)])
    with pytest.raises(CapabilityError, match="no position at all"):
        Objective(estimator=part).freeze([(found[0], packed)])


def test_the_function_and_the_part_agree() -> None:
    data = rollouts(GROUP)
    assert torch.equal(grpo_estimate(data.rewards, data.scored, data).squeeze(1), GRPO().estimate(data))


def test_estimates_carry_no_gradient() -> None:
    rewards = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    for part in (GRPO(), GRPO(scale="batch"), RLOO(), GDPO()):
        assert not part.estimate(rollouts(rewards)).requires_grad
