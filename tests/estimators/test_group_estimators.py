"""OPO, GPG, pass@k, MaxRL, the batch baseline and leave-one-out, against oracles and published numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    BatchBaseline,
    CapabilityError,
    MaxRL,
    MissingColumnError,
    NonFiniteError,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    PassAtK,
    ReinforcePlusPlusBaseline,
    Rollouts,
    ShapeError,
    TrainerFacts,
)
from rlobjectives.functional import overlong_penalty, pass_at_k
from tests.estimators.helpers import close, final, rollouts_of
from tests.oracles import group as oracle

REWARDS = [1.0, 0.0, 0.5, 0.0]
GROUP = [9, 9, 9, 9]


def group_of(rewards, groups=None, lengths=None, **columns):
    lengths = lengths or [1] * len(rewards)
    return rollouts_of([[1] * n for n in lengths], rewards, groups=groups or [9] * len(rewards), **columns)


def two_groups(one, other):
    """Interleaved, under ids that are neither sorted nor dense."""
    rewards, groups = [], []
    for k in range(max(len(one), len(other))):
        for ids, part in ((40, one), (-3, other)):
            if k < len(part):
                rewards.append(part[k])
                groups.append(ids)
    return rewards, groups


rewards_strategy = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=2, max_size=7)


class TestOPO:
    def test_numbers(self):
        found = OPO().estimate(group_of(REWARDS, lengths=[4, 2, 3, 1]))
        close(found, [0.45, -0.55, -0.05, -0.55])

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(one=rewards_strategy, other=rewards_strategy, seed=st.integers(0, 999))
    def test_equals_the_formula(self, one, other, seed):
        rewards, groups = two_groups(one, other)
        lengths = torch.randint(1, 9, (len(rewards),), generator=torch.Generator().manual_seed(seed)).tolist()
        found = OPO().estimate(group_of(rewards, groups, lengths))
        for ids in set(groups):
            rows = [i for i, g in enumerate(groups) if g == ids]
            close(found[rows], oracle.opo([rewards[i] for i in rows], [lengths[i] for i in rows]))

    def test_empty_and_unscored_responses_do_not_move_the_baseline(self):
        mask = [[1, 1], [1, 0], [0, 0], [1, 1]]
        scored = torch.tensor([True, True, True, False])
        found = OPO().estimate(rollouts_of(mask, [1.0, 0.0, 7.0, 7.0], groups=GROUP, scored=scored))
        close(found, [1 - 2 / 3, -2 / 3, 7 - 2 / 3, 0.0])

    def test_a_group_of_empty_responses_gives_zero(self):
        assert OPO().estimate(rollouts_of([[0], [0]], [1.0, 0.0], groups=[1, 1])).tolist() == [0.0, 0.0]

    def test_whole_lengths_count_where_a_rank_has_a_part(self):
        layout = PaddedLayout(torch.tensor([[True], [True]]), total_tokens=torch.tensor([3.0, 1.0]))
        rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]), layout=layout)
        close(OPO().estimate(rollouts), [0.25, -0.75])

    def test_needs_a_layout(self):
        with pytest.raises(MissingColumnError, match="layout"):
            OPO().estimate(Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7])))


class TestGPG:
    def test_numbers_with_the_count_of_nonzero_rewards(self):
        found = final(GPG(count="nonzero"), group_of(REWARDS))
        close(found.flatten(), [1.25, -0.75, 0.25, -0.75])

    def test_counts_groups_with_spread_by_default(self):
        rollouts = group_of([*REWARDS, 1.0, 1.0], groups=[9, 9, 9, 9, 2, 2])
        close(final(GPG(), rollouts).flatten(), [x * 6 / 4 for x in oracle.centred(REWARDS)] + [0, 0])
        close(final(GPG(), group_of(REWARDS)).flatten(), oracle.centred(REWARDS))

    def test_signs_of_rewards_do_not_change_the_count(self):
        close(final(GPG(), group_of([1.0, -1.0, -1.0, 1.0])).flatten(), [1.0, -1.0, -1.0, 1.0])

    def test_the_count_is_taken_over_the_window(self):
        objective = Objective(estimator=GPG())
        one, other = group_of(REWARDS), group_of([1.0, 1.0], groups=[1, 1])
        parts = [(objective.estimator.estimate(r), r.layout) for r in (one, other)]
        window = objective.freeze(parts)
        close(window.advantages(*parts[0]).flatten(), [x * 1.5 for x in oracle.centred(REWARDS)])
        alone = objective.freeze(parts[:1])
        close(alone.advantages(*parts[0]).flatten(), oracle.centred(REWARDS))

    def test_divisor_and_a_window_without_signal(self):
        close(final(GPG(divisor=2.0), group_of([1.0, 0.0])).flatten(), [0.25, -0.25])
        assert not final(GPG(), group_of([0.7, 0.7])).any()
        assert not final(GPG(count="nonzero"), group_of([0.0, 0.0])).any()

    def test_unscored_sequences_do_not_count(self):
        scored = torch.tensor([True, True, False])
        found = final(GPG(), group_of([1.0, 0.0, 9.0], scored=scored))
        close(found.flatten(), [0.5, -0.5, 0.0])


class TestPassAtK:
    def test_analytic_numbers(self):
        found = PassAtK(k=2).estimate(group_of([1.0, 0.0, 0.0, 0.0]))
        close(found, [1.0, -1 / 3, -1 / 3, -1 / 3], 1e-12)
        close(pass_at_k(torch.tensor(4.0), torch.tensor(1.0), 2), 0.5, 1e-6)
        with pytest.raises(CapabilityError, match="k is 0"):
            pass_at_k(torch.tensor(4.0), torch.tensor(1.0), 0)

    def test_with_an_epsilon_as_published(self):
        found = PassAtK(k=2, epsilon=1e-6).estimate(group_of([1.0, 0.0, 0.0, 0.0]))
        close(found, [0.999998000004, *[-0.333332666668] * 3], 1e-11)

    @pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [1.0, 1.0, 1.0, 0.0]])
    def test_zero_where_every_draw_ends_alike(self, rewards):
        assert PassAtK(k=2, epsilon=1e-6).estimate(group_of(rewards)).tolist() == [0.0] * 4

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(data=st.data())
    def test_analytic_equals_integer_binomials(self, data):
        k = data.draw(st.integers(1, 5))
        flags = st.lists(st.booleans(), min_size=max(2, k), max_size=40)
        one, other = data.draw(flags), data.draw(flags)
        rewards, groups = two_groups([float(x) for x in one], [float(x) for x in other])
        found = PassAtK(k=k).estimate(group_of(rewards, groups))
        for ids, part in ((40, one), (-3, other)):
            rows = [i for i, g in enumerate(groups) if g == ids]
            torch.testing.assert_close(
                found[rows],
                torch.tensor(oracle.pass_at_k(part, k), dtype=torch.float64),
                rtol=1e-10,
                atol=1e-10,
            )

    def test_large_groups_do_not_overflow(self):
        correct = [i < 3 for i in range(512)]
        found = PassAtK(k=64).estimate(group_of([float(x) for x in correct]))
        torch.testing.assert_close(
            found, torch.tensor(oracle.pass_at_k(correct, 64), dtype=torch.float64), rtol=1e-9, atol=1e-12
        )

    def test_k_of_one_has_the_direction_of_the_centred_reward(self):
        found = PassAtK(k=1).estimate(group_of([1.0, 0.0, 0.0, 1.0, 0.0]))
        close(found, [x / math.sqrt(0.4 * 0.6) for x in oracle.centred([1, 0, 0, 1, 0])])

    def test_threshold_and_unscored(self):
        scored = torch.tensor([True, True, True, True, False])
        found = PassAtK(k=2, threshold=0.5).estimate(group_of([0.9, 0.5, 0.1, 0.2, 9.0], scored=scored))
        close(found, [1.0, -1 / 3, -1 / 3, -1 / 3, 0.0])

    def test_lead_numbers(self):
        close(
            PassAtK(form="max_minus_second", epsilon=1e-6).estimate(group_of(REWARDS)),
            [1.044463753921, 0, 0, 0],
        )
        close(PassAtK(form="max_minus_second", scale="none").estimate(group_of(REWARDS)), [0.5, 0, 0, 0])

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(one=rewards_strategy, other=rewards_strategy, scale=st.sampled_from(["group", "none"]))
    def test_lead_equals_the_formula(self, one, other, scale):
        rewards, groups = two_groups(one, other)
        estimator = PassAtK(form="max_minus_second", scale=scale, epsilon=1e-6)
        found = estimator.estimate(group_of(rewards, groups))
        for ids, part in ((40, one), (-3, other)):
            close(found[[i for i, g in enumerate(groups) if g == ids]], oracle.lead(part, scale, 1e-6), 1e-9)

    def test_a_tie_for_the_best_rewards_nobody(self):
        assert PassAtK(form="max_minus_second").estimate(group_of([1.0, 1.0, 0.0])).tolist() == [0.0] * 3

    def test_lead_among_the_scored(self):
        scored = torch.tensor([True, True, False])
        found = PassAtK(form="max_minus_second", scale="none").estimate(
            group_of([1.0, 0.25, 9.0], scored=scored)
        )
        close(found, [0.75, 0.0, 0.0])
        one = torch.tensor([True, False, False])
        assert (
            PassAtK(form="max_minus_second").estimate(group_of([1.0, 0.0, 0.0], scored=one)).tolist()
            == [0.0] * 3
        )

    def test_groups_too_small_to_draw_from(self):
        with pytest.raises(CapabilityError, match="draws 3"):
            PassAtK(k=3).estimate(group_of([1.0, 0.0]))
        assert PassAtK(k=3, on_singleton="zero").estimate(group_of([1.0, 0.0])).tolist() == [0.0, 0.0]
        assert PassAtK(k=3).required().min_group_size == 3
        assert PassAtK(k=9, form="max_minus_second").required().min_group_size == 2
        with pytest.raises(CapabilityError, match="at least 8 completions"):
            Objective.named("pass_at_k", estimator={"k": 8}).check(TrainerFacts(num_generations=4))


class TestMaxRL:
    def test_numbers(self):
        found = MaxRL().estimate(group_of(REWARDS))
        close(found, [1.666662222234, -0.99999733334, 0.333332444447, -0.99999733334])
        close(found, oracle.max_rl(REWARDS, 1e-6), 1e-12)

    def test_a_negative_reward_is_refused(self):
        with pytest.raises(CapabilityError, match=r"1 of 2 sequences have a negative reward.*sequence 1"):
            MaxRL().estimate(group_of([1.0, -0.1]))
        with pytest.raises(CapabilityError):
            MaxRL(weights=(-1.0,))

    def test_unscored_negatives_do_not_matter_and_zero_groups_are_zero(self):
        scored = torch.tensor([True, True, False])
        close(MaxRL(epsilon=0.0).estimate(group_of([1.0, 0.0, -9.0], scored=scored)), [1.0, -1.0, 0.0])
        assert MaxRL(epsilon=0.0).estimate(group_of([0.0, 0.0])).tolist() == [0.0, 0.0]


class TestBatchBaseline:
    def test_subtracts_the_mean_of_the_window_whatever_the_groups(self):
        objective = Objective.named("reinforce_batch")
        one, other = group_of([1.0, 0.0], groups=[1, 2]), group_of([4.0], groups=[3])
        parts = [(objective.estimator.estimate(r), r.layout) for r in (one, other)]
        window = objective.freeze(parts)
        close(window.advantages(*parts[0]).flatten(), [1 - 5 / 3, -5 / 3])
        close(window.advantages(*parts[1]).flatten(), [4 - 5 / 3])

    @pytest.mark.parametrize("ddof", [0, 1])
    def test_scale(self, ddof):
        mean = sum(REWARDS) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in REWARDS) / (4 - ddof))
        found = final(BatchBaseline(scale="batch", ddof=ddof, epsilon=0.1), group_of(REWARDS))
        close(found.flatten(), [(r - mean) / (std + 0.1) for r in REWARDS])

    @pytest.mark.parametrize("scale", ["none", "batch"])
    @pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, -1e4, 1e-8])
    def test_equal_rewards_give_exact_zeros(self, scale, reward):
        assert not final(BatchBaseline(scale=scale), group_of([reward] * 7)).any()

    def test_unscored_and_dummy_rows_stay_out(self):
        scored = torch.tensor([True, True, False])
        found = final(BatchBaseline(), group_of([1.0, 0.0, 50.0], scored=scored))
        close(found.flatten(), [0.5, -0.5, 0.0])
        layout = PaddedLayout(
            torch.ones(3, 1, dtype=torch.bool), sequence_mask=torch.tensor([True, True, False])
        )
        rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0, 50.0]), group_ids=torch.arange(3), layout=layout)
        close(final(BatchBaseline(), rollouts)[:2].flatten(), [0.5, -0.5])


class TestLeaveOneOutGRPO:
    def test_numbers(self):
        found = GRPO(baseline="leave_one_out").estimate(group_of(REWARDS))
        close(found, [2.886741345983, -0.999998000004, 0.288674634596, -0.999998000004])

    @pytest.mark.parametrize("scale", ["group", "none"])
    def test_two_answers_have_no_spread_to_divide_by(self, scale):
        found = GRPO(baseline="leave_one_out", scale=scale).estimate(group_of([3.0, 1.0]))
        close(found, [2.0, -2.0])

    def test_two_scored_answers_among_more(self):
        scored = torch.tensor([True, True, False])
        found = GRPO(baseline="leave_one_out").estimate(group_of([3.0, 1.0, 9.0], scored=scored))
        close(found, [2.0, -2.0, 0.0])


class TestOverlongPenalty:
    def test_numbers(self):
        lengths = [70, 80, 90, 100, 101, 5000]
        found = overlong_penalty(torch.tensor(lengths), max_tokens=100, buffer_tokens=20)
        close(found, [0, 0, -0.5, -1.0, -1.0, -1.0])
        close(found, [oracle.overlong(n, 100, 20) for n in lengths])

    def test_bad_options_are_refused(self):
        for options in (
            {"max_tokens": 0, "buffer_tokens": 1},
            {"max_tokens": 5, "buffer_tokens": 6},
            {"max_tokens": True, "buffer_tokens": 1},
            {"max_tokens": 5, "buffer_tokens": 2.0},
        ):
            with pytest.raises(CapabilityError):
                overlong_penalty(torch.tensor([1]), **options)
        with pytest.raises(ShapeError):
            overlong_penalty(torch.tensor([[1]]), max_tokens=5, buffer_tokens=2)
        for lengths in (torch.tensor([True]), torch.tensor([1j]), [1]):
            with pytest.raises(ShapeError, match="lengths"):
                overlong_penalty(lengths, max_tokens=5, buffer_tokens=2)
        for length in (math.nan, math.inf, -math.inf):
            with pytest.raises(NonFiniteError, match="lengths has 1 non-finite"):
                overlong_penalty(torch.tensor([3.0, length]), max_tokens=5, buffer_tokens=2)


CENTRING = [
    OPO(),
    GPG(),
    GPG(count="nonzero"),
    MaxRL(),
    PassAtK(k=2),
    PassAtK(form="max_minus_second"),
    PassAtK(k=2, epsilon=1e-6),
]


@pytest.mark.parametrize("estimator", CENTRING, ids=repr)
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.35, 0.7, 0.95, 1e-8])
def test_a_constant_group_is_exactly_zero(estimator, reward):
    for size in range(2, 17):
        # Sums of a few float32 numbers are exact in float64; those of float64 numbers leave a residue.
        for one in (float(torch.tensor(reward, dtype=torch.float32)), reward):
            lengths = [1 + position % 3 for position in range(size)]
            assert not final(estimator, group_of([one] * size, lengths=lengths)).any()


@pytest.mark.parametrize("estimator", CENTRING, ids=repr)
def test_a_singleton_is_an_error_or_zero(estimator):
    import dataclasses

    rollouts = group_of([0.7, 0.0, 1.0], groups=[0, 1, 1])
    with pytest.raises(CapabilityError, match="single completion"):
        estimator.estimate(rollouts)
    lenient = dataclasses.replace(estimator, on_singleton="zero")
    assert final(lenient, rollouts)[0].tolist() == [0.0]


COMPARING = [*CENTRING, GRPO(), GRPO(baseline="leave_one_out"), GDPO(), RLOO(), ReinforcePlusPlusBaseline()]
COMPARING += [OptimalTokenBaseline()]


def with_dummies(rewards, groups, genuine):
    """Rows of one or two tokens; those that are not genuine only keep ranks in step, and hold anything."""
    flags = torch.tensor(genuine)
    mask = torch.tensor([[True, row % 2 == 0] for row in range(len(rewards))]) & flags[:, None]
    facts = {} if all(genuine) else {"sequence_mask": flags}
    half = torch.full(mask.shape, 0.5, dtype=torch.float64)
    return Rollouts(
        rewards=torch.tensor(rewards)[:, None] * torch.tensor([1.0, 0.5]),
        group_ids=torch.tensor(groups),
        layout=PaddedLayout(mask, **facts),
        old_logprobs=half.log(),
        squared_probs=half,
    )


@pytest.mark.parametrize("estimator", COMPARING, ids=repr)
class TestDummies:
    def test_they_change_nothing(self, estimator):
        """Neither a dummy of a group, nor a group of dummies, whatever their rewards."""
        genuine = [True, True, True, True, False, False, False]
        padded = with_dummies([1.0, 0.0, 0.5, 0.25, 9.0, math.nan, 3.0], [4, 4, 8, 8, 4, 4, 1], genuine)
        alone = with_dummies([1.0, 0.0, 0.5, 0.25], [4, 4, 8, 8], [True] * 4)
        found = estimator.estimate(padded)
        assert torch.equal(found[:4], estimator.estimate(alone))
        assert not found.reshape(7, -1)[4:, 0].any()  # further columns are the estimator's own

    def test_they_make_no_singleton(self, estimator):
        rollouts = with_dummies([1.0, 0.0, 0.0, 0.0], [4, 4, 4, 8], [True, True, True, False])
        assert estimator.estimate(rollouts)[:3].any()

    def test_they_save_no_singleton(self, estimator):
        rollouts = with_dummies([1.0, 0.0, 0.5, 0.5, 0.5], [4, 4, 8, 8, 2], [True, True, True, False, False])
        with pytest.raises(CapabilityError, match=r"1 of 2 groups have a single completion \(group_ids 8\)"):
            estimator.estimate(rollouts)


@pytest.mark.parametrize("kind", [OPO, GPG, MaxRL, PassAtK])
def test_bad_common_options_are_refused(kind):
    for options in ({"on_singleton": "raw"}, {"weights": (math.nan,)}):
        with pytest.raises(CapabilityError):
            kind(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GPG, {"count": "all"}),
        (GPG, {"divisor": 0.0}),
        (MaxRL, {"epsilon": -1.0}),
        (PassAtK, {"k": 0}),
        (PassAtK, {"k": True}),
        (PassAtK, {"form": "best"}),
        (PassAtK, {"scale": "batch"}),
        (PassAtK, {"epsilon": -1.0}),
        (PassAtK, {"threshold": math.inf}),
        (BatchBaseline, {"scale": "group"}),
        (BatchBaseline, {"ddof": 2}),
        (BatchBaseline, {"epsilon": -1.0}),
        (BatchBaseline, {"weights": (math.nan,)}),
        (BatchBaseline, {"weights": 2.0}),
        (GDPO, {"weights": 2.0}),
    ],
)
def test_bad_options_are_refused(kind, options):
    with pytest.raises(CapabilityError):
        kind(**options)


@pytest.mark.parametrize("estimator", [*CENTRING, GRPO(baseline="leave_one_out")], ids=repr)
def test_weights_combine_columns_and_signal_is_judged_on_the_sum(estimator):
    import dataclasses

    weighted = dataclasses.replace(estimator, weights=(0.5, 2.0))
    rollouts = group_of([[1.0, 0.5], [0.0, 0.25], [1.0, 0.25], [3.0, 0.25]])
    close(weighted.estimate(rollouts), estimator.estimate(group_of([1.5, 0.5, 1.0, 2.0])), 1e-12)
    cancelling = dataclasses.replace(estimator, weights=(1.0, 2.0))
    assert not cancelling.carries_signal(group_of([[1.0, 0.5], [0.0, 1.0]])).any()


@pytest.mark.parametrize("estimator", [OPO(), GPG(), MaxRL(), PassAtK(k=2)], ids=repr)
def test_operations_do_not_grow_with_sequences(estimator):
    from tests.measure import Cost

    counts = []
    for size in (4096, 32_768):
        mask = torch.ones(size, 2, dtype=torch.bool)
        rollouts = Rollouts(
            rewards=torch.rand(size), group_ids=torch.arange(size) % (size // 8), layout=PaddedLayout(mask)
        )
        with Cost() as cost:
            estimator.estimate(rollouts)
        counts.append(cost.operations)
    assert counts[0] == counts[1]
