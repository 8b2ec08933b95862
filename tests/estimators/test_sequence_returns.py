"""REINFORCE++, ReMax and the optimal token baseline."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import (
    CapabilityError,
    KLPenalty,
    MissingColumnError,
    NonFiniteError,
    Objective,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    ShapeError,
    TrainerFacts,
)
from tests.estimators.helpers import LAYOUTS, close, final, layout_of, rollouts_of, rows_of
from tests.oracles import credit as oracle

both_layouts = pytest.mark.parametrize("kind", LAYOUTS)


class TestReinforcePlusPlus:
    MASK: ClassVar = [[1, 1, 1], [1, 1, 0]]
    COLUMNS: ClassVar = {
        "old_logprobs": [[-0.8, -1.1, -0.7], [-0.95, -0.6, 9.0]],
        "ref_logprobs": [[-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0]],
    }

    def rollouts(self, kind="padded"):
        return rollouts_of(self.MASK, [1.0, -0.5], kind, **self.COLUMNS)

    @both_layouts
    def test_returns(self, kind):
        found = ReinforcePlusPlus(discount=0.9, kl_coef=0.1).estimate(self.rollouts(kind))
        close(rows_of(found, self.MASK, kind), [[0.7747, 0.883, 0.97], [-0.491, -0.54, 0]])

    @both_layouts
    def test_population_variance_with_a_floor(self, kind):
        found = final(ReinforcePlusPlus(discount=0.9, kl_coef=0.1), self.rollouts(kind))
        expected = [[0.665125660879, 0.823315025499, 0.950392354418], [-1.183630376047, -1.255202664748, 0]]
        close(rows_of(found, self.MASK, kind), expected)

    def test_sample_variance_with_epsilon_inside(self):
        estimator = ReinforcePlusPlus(discount=0.9, kl_coef=0.1, ddof=1, epsilon_mode="variance")
        expected = [[0.594906471445, 0.73639533928, 0.850056756655], [-1.058671183395, -1.122687383985, 0]]
        close(final(estimator, self.rollouts()), expected)

    @both_layouts
    @pytest.mark.parametrize("observations", ["skip", "step"])
    def test_observations(self, kind, observations):
        mask = [[1, 0, 0, 1, 0], [0, 1, 1]]
        rollouts = rollouts_of(
            mask, [1.0, 2.0], kind, token_rewards=[[0.5, 9.0, 9.0, 0.25, 9.0], [9.0, 1.0, 0.0]]
        )
        found = ReinforcePlusPlus(
            discount=0.9, observations=observations, on_observation_reward="drop"
        ).estimate(rollouts)
        rewards = [[0.5, 0, 0, 1.25, 0], [0, 1.0, 2.0]]
        through = observations == "step"
        expected = [
            oracle.to_go(r, m, 0.9, through_masked=through) for r, m in zip(rewards, mask, strict=True)
        ]
        for one, other in zip(rows_of(found, mask, kind), expected, strict=True):
            close(one, other)

    def test_sequences_without_action_tokens_count_for_nothing(self):
        some = rollouts_of([[1, 1], [0, 0]], [1.0, 0.0])
        alone = rollouts_of([[1, 1]], [1.0])
        estimator = ReinforcePlusPlus(discount=0.5)
        close(final(estimator, some)[0], final(estimator, alone)[0])
        assert final(estimator, some)[1].tolist() == [0.0, 0.0]

    def test_a_reward_without_an_action_token_is_an_error(self):
        with pytest.raises(CapabilityError, match="no action token"):
            ReinforcePlusPlus().estimate(rollouts_of([[0]], [1.0]))

    def test_a_window_of_equal_returns_gives_exact_zeros(self):
        assert (
            final(ReinforcePlusPlus(), rollouts_of([[1, 1], [1, 0]], [0.7, 0.7])).tolist() == [[0.0, 0.0]] * 2
        )

    def test_without_normalisation_the_returns_come_through(self):
        rollouts = rollouts_of([[1, 1]], [1.0])
        close(final(ReinforcePlusPlus(normalize="none", discount=0.5), rollouts), [[0.5, 1.0]])

    def test_needs_a_reference_only_for_shaping(self):
        assert Objective.named("reinforce_pp").capabilities.needs_ref_logprobs
        assert not Objective.named("reinforce_pp", estimator={"kl_coef": 0.0}).capabilities.needs_ref_logprobs
        with pytest.raises(MissingColumnError, match="ref_logprobs"):
            ReinforcePlusPlus(kl_coef=0.1).estimate(rollouts_of([[1]], [1.0], old_logprobs=[[0.0]]))

    @pytest.mark.parametrize(
        "options",
        [
            {"discount": 2.0},
            {"observations": "zero_value"},
            {"kl_coef": -1.0},
            {"kl_estimator": "k9"},
            {"on_lost_reward": "x"},
            {"weights": (math.nan,)},
            {"ddof": 3},
        ],
    )
    def test_bad_options_are_refused(self, options):
        with pytest.raises(CapabilityError):
            ReinforcePlusPlus(**options)


class TestReinforcePlusPlusBaseline:
    MASK: ClassVar = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]]

    def rollouts(self):
        return rollouts_of(self.MASK, [1.0, 0.0, 0.5, 0.0], groups=[4, 4, 4, 4])

    def test_longer_answers_weigh_more(self):
        found = final(ReinforcePlusPlusBaseline(), self.rollouts())
        close(found[:, 1], [1.154700538379, 0, 0, -1.154700538379])
        close(found[:, 0], [1.154700538379, -1.154700538379, 0, 0])

    def test_sample_variance_with_epsilon_inside(self):
        found = final(ReinforcePlusPlusBaseline(ddof=1, epsilon_mode="variance"), self.rollouts())
        close(found[:, 0], [1.080123424532, -1.080123424532, 0, 0])

    def test_raw_and_unscored(self):
        scored = torch.tensor([True, True, True, False])
        rollouts = rollouts_of(self.MASK, [1.0, 0.0, 0.5, 99.0], groups=[4] * 4, scored=scored)
        estimator = ReinforcePlusPlusBaseline()
        close(estimator.estimate(rollouts), [[0.5, 1, 1], [-0.5, 1, 1], [0, 1, 1], [0, 0, 1]])
        close(final(estimator, rollouts)[3], [0.0, 0.0, 0.0])
        three = rollouts_of(self.MASK[:3], [1.0, 0.0, 0.5], groups=[4] * 3)
        close(final(estimator, rollouts)[:3], final(estimator, three))

    @pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, -1e4, 1e-8])
    @pytest.mark.parametrize("size", [2, 3, 8, 16])
    def test_a_constant_window_is_exactly_zero(self, reward, size):
        rollouts = rollouts_of([[1, 1]] * size, [reward] * size, groups=[0] * size)
        assert not final(ReinforcePlusPlusBaseline(), rollouts).any()

    def test_a_constant_group_beside_a_live_one_stays_zero_and_still_counts(self):
        rollouts = rollouts_of([[1, 1]] * 2 + [[1, 1], [1, 0]], [0.7, 0.7, 1.0, 0.0], groups=[0, 0, 1, 1])
        found = final(ReinforcePlusPlusBaseline(), rollouts)
        assert not found[:2].any()
        # Tokens: 0, 0, 0, 0, ½, ½, −½.
        mean = 0.5 / 7
        spread = math.sqrt((0.75 - 0.25 / 7) / 7)
        close(found[2:], [[(0.5 - mean) / spread] * 2, [(-0.5 - mean) / spread, 0.0]])

    def test_singletons(self):
        with pytest.raises(CapabilityError, match="single completion"):
            ReinforcePlusPlusBaseline().estimate(
                rollouts_of([[1], [1], [1]], [1.0, 2.0, 3.0], groups=[0, 1, 1])
            )
        found = ReinforcePlusPlusBaseline(on_singleton="zero").estimate(
            rollouts_of([[1], [1], [1]], [1.0, 2.0, 3.0], groups=[0, 1, 1])
        )
        close(found[:, 0], [0.0, -0.5, 0.5])

    def test_named(self):
        objective = Objective.named("reinforce_pp_baseline")
        assert isinstance(objective.kl, KLPenalty) and objective.kl.estimator == "k2"
        with pytest.raises(CapabilityError, match="at least 2 completions"):
            objective.check(TrainerFacts(num_generations=1, offers={"ref_logprobs": True}))
        with pytest.raises(CapabilityError, match="normalize_advantages"):
            objective.check(TrainerFacts(normalize_advantages=True, offers={"ref_logprobs": True}))
        for options in ({"on_singleton": "x"}, {"weights": (math.nan,)}):
            with pytest.raises(CapabilityError):
                ReinforcePlusPlusBaseline(**options)


class TestReMax:
    MASK: ClassVar = [[1, 1, 1], [1, 1, 0]]

    @both_layouts
    def test_numbers(self, kind):
        rollouts = rollouts_of(
            self.MASK,
            [0.0, 0.0],
            kind,
            token_rewards=[[0, 0, 1], [0, 0.5, 0]],
            greedy_rewards=torch.tensor([0.4, 0.2], dtype=torch.float64),
        )
        close(rows_of(ReMax().estimate(rollouts), self.MASK, kind), [[0.6, 0.6, 0.6], [0.3, 0.3, 0]])

    def test_sequence_rewards_weights_and_shaping(self):
        rollouts = rollouts_of(
            [[1, 0, 1]],
            [[1.0, 2.0]],
            greedy_rewards=torch.tensor([[0.5, 1.0]]),
            old_logprobs=[[-1.0, math.nan, -1.0]],
            ref_logprobs=[[-2.0, math.nan, -1.5]],
        )
        found = ReMax(weights=(1.0, 0.5), kl_coef=0.1).estimate(rollouts)
        close(found, [[2.0 - 1.0 - 0.1 - 0.05, 0.0, 2.0 - 1.0 - 0.05]])

    def test_a_missing_greedy_answer_is_an_error(self):
        with pytest.raises(MissingColumnError, match="greedy_rewards"):
            ReMax().estimate(rollouts_of([[1]], [1.0]))
        with pytest.raises(NonFiniteError, match="greedy_rewards"):
            rollouts_of([[1]], [1.0], greedy_rewards=torch.tensor([math.nan]))
        with pytest.raises(ShapeError, match="greedy_rewards"):
            rollouts_of([[1]], [1.0], greedy_rewards=torch.tensor([1.0, 2.0]))

    def test_bad_options_are_refused(self):
        for options in (
            {"kl_coef": -1.0},
            {"on_lost_reward": "x"},
            {"weights": (math.nan,)},
            {"normalize": "x"},
        ):
            with pytest.raises(CapabilityError):
                ReMax(**options)


class TestOptimalTokenBaseline:
    def rollouts(self, kind="padded"):
        logs = [[math.log(0.5), math.log(0.8)], [math.log(0.4), math.log(0.9)]]
        return rollouts_of(
            [[1, 1], [1, 1]],
            [1.0, 0.0],
            kind,
            groups=[3, 3],
            old_logprobs=logs,
            squared_probs=[[0.4, 0.7], [0.3, 0.85]],
        )

    @both_layouts
    def test_numbers(self, kind):
        found = OptimalTokenBaseline().estimate(self.rollouts(kind))
        expected = [[0.555555560494, 0.523809528345], [-0.444444439506, -0.476190471655]]
        close(rows_of(found, [[1, 1]] * 2, kind), expected)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        seed=st.integers(0, 2**20),
        sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3),
        kind=st.sampled_from(LAYOUTS),
    )
    def test_equals_the_plain_formula(self, seed, sizes, kind):
        rng = torch.Generator().manual_seed(seed)
        count = sum(sizes)
        groups = [g for g, size in enumerate(sizes) for _ in range(size)]
        order = torch.randperm(count, generator=rng).tolist()
        groups = [groups[i] for i in order]
        lengths = torch.randint(1, 7, (count,), generator=rng).tolist()
        uniform = lambda n: (0.05 + 0.9 * torch.rand(n, generator=rng, dtype=torch.float64)).tolist()
        mask = [(torch.rand(n, generator=rng) > 0.3).int().tolist() for n in lengths]
        probs, squared, extra = ([uniform(n) for n in lengths] for _ in range(3))
        squared = [
            [p * p + s * (1 - p) ** 2 for p, s in zip(*two, strict=True)]
            for two in zip(probs, squared, strict=True)
        ]
        rewards = uniform(count)
        rollouts = rollouts_of(
            mask,
            rewards,
            kind,
            groups=groups,
            token_rewards=extra,
            old_logprobs=[[math.log(p) for p in row] for row in probs],
            squared_probs=squared,
        )
        found = OptimalTokenBaseline(on_lost_reward="drop", on_observation_reward="drop").estimate(rollouts)
        returns = []
        for row, counted in enumerate(mask):
            gains = [g if m else 0.0 for g, m in zip(extra[row], counted, strict=True)]
            last = max((t for t, m in enumerate(counted) if m), default=None)
            if last is not None:
                gains[last] += rewards[row]
            returns.append(oracle.to_go(gains, counted, 1.0))
        energy = [
            [1 - 2 * p + s for p, s in zip(*rows, strict=True)] for rows in zip(probs, squared, strict=True)
        ]
        expected = oracle.optimal_token_baseline(returns, energy, mask, groups, 1e-8)
        for one, other in zip(rows_of(found, mask, kind), expected, strict=True):
            close(one, other)

    def test_importance_weights_are_capped_and_squared(self):
        logs = [[0.0], [-1.0]]
        rollouts = rollouts_of(
            [[1], [1]],
            [1.0, 0.0],
            groups=[0, 0],
            old_logprobs=logs,
            behavior_logprobs=[[-5.0], [-1.5]],
            squared_probs=[[2.0], [0.5]],
        )
        weights = [(1 - 2 + 2.0) * 4.0, (1 - 2 * math.exp(-1) + 0.5) * math.exp(0.5) ** 2]
        baseline = weights[0] / sum(weights)
        found = OptimalTokenBaseline(importance_clip=2.0, baseline_epsilon=0.0).estimate(rollouts)
        close(found, [[1 - baseline], [-baseline]])
        assert OptimalTokenBaseline(importance_clip=2.0).required().needs_behavior_logprobs

    def test_equal_returns_are_exactly_zero_and_a_lone_tail_keeps_its_return(self):
        columns = {"old_logprobs": [[-1.0, -1.0], [-2.0, -1.0]], "squared_probs": [[0.5, 0.5], [0.4, 0.4]]}
        found = OptimalTokenBaseline().estimate(
            rollouts_of([[1, 1], [0, 1]], [0.7, 0.7], groups=[0, 0], **columns)
        )
        assert found.tolist() == [[0.0, 0.7], [0.0, 0.0]]

    def test_singletons_and_unscored(self):
        columns = {"old_logprobs": [[-1.0]] * 3, "squared_probs": [[0.5]] * 3}
        rollouts = rollouts_of([[1]] * 3, [1.0, 1.0, 0.0], groups=[0, 1, 1], **columns)
        with pytest.raises(CapabilityError, match="single completion"):
            OptimalTokenBaseline().estimate(rollouts)
        assert OptimalTokenBaseline(on_singleton="zero").estimate(rollouts)[0].tolist() == [0.0]
        scored = torch.tensor([True, True, False])
        three = rollouts_of([[1]] * 3, [1.0, 0.0, 50.0], groups=[0] * 3, scored=scored, **columns)
        close(OptimalTokenBaseline(baseline_epsilon=0.0).estimate(three), [[0.5], [-0.5], [0.0]])

    def test_what_it_needs(self):
        with pytest.raises(MissingColumnError, match="squared_probs"):
            OptimalTokenBaseline().estimate(
                rollouts_of([[1], [1]], [1.0, 0.0], groups=[0, 0], old_logprobs=[[0.0]] * 2)
            )
        for options in (
            {"importance_clip": 0.0},
            {"baseline_epsilon": -1.0},
            {"on_singleton": "x"},
            {"on_lost_reward": "x"},
            {"weights": (math.nan,)},
        ):
            with pytest.raises(CapabilityError):
                OptimalTokenBaseline(**options)

    def test_a_mask_of_any_kind_reads_nothing_beneath(self):
        clean = {"old_logprobs": [[-1.0, 0.0], [-2.0, -1.0]], "squared_probs": [[0.5, 0.0], [0.4, 0.4]]}
        dirty = {
            "old_logprobs": [[-1.0, math.inf], [-2.0, -1.0]],
            "squared_probs": [[0.5, math.nan], [0.4, 0.4]],
        }
        mask = [[1, 0], [1, 1]]
        one, other = (
            OptimalTokenBaseline().estimate(rollouts_of(mask, [1.0, 0.0], groups=[0, 0], **columns))
            for columns in (clean, dirty)
        )
        assert torch.equal(one, other)
        assert layout_of(mask).width == 2
