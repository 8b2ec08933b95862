"""Combined estimators, the teacher signal, and token statistics over context-parallel ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from rlobjectives import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    RLOO,
    BatchBaseline,
    CapabilityError,
    Combined,
    Communicator,
    Estimator,
    MissingColumnError,
    Objective,
    PackedLayout,
    PaddedLayout,
    ReinforcePlusPlusBaseline,
    Rollouts,
    TeacherSignal,
    TrainerFacts,
)
from tests.estimators.helpers import LAYOUTS, close, column, final, layout_of, rollouts_of, rows_of
from tests.ranks import run_ranks

MASK = [[1, 1, 1], [1, 1, 0], [0, 1], [1]]
GROUPS = [3, 3, -1, -1]
both_layouts = pytest.mark.parametrize("kind", LAYOUTS)


def rollouts(kind="padded", **more):
    return rollouts_of(
        MASK,
        [[1.0, 0.5], [0.0, 1.0], [2.0, 0.0], [0.5, 0.5]],
        kind,
        groups=GROUPS,
        old_logprobs=[[-1.0, -2.0, -0.5], [-1.5, -0.7, math.nan], [math.inf, -1.0], [-0.2]],
        teacher_logprobs=[[-0.9, -1.5, -0.6], [-0.8, -1.3, 0.0], [0.0, -1.25], [-0.3]],
        **more,
    )


class Fixed(Estimator):
    """Whatever advantages are put into the rewards."""

    def estimate(self, rollouts):
        return rollouts.rewards[:, 0]


class TestValueTargets:
    def data(self):
        return rollouts_of(
            MASK, [1.0, 0.0, 2.0, 0.5], groups=[3, 3, 3, 3], values=[[0.1] * 3, [0.2] * 3, [0.3] * 2, [0.4]]
        )

    def test_are_those_of_the_part_that_reads_the_critic(self):
        gae = GAE(discount=0.9, trace_decay=0.8)
        both = Combined(estimators=(GRPO(), gae, GAE(discount=0.9, trace_decay=0.8)), weights=(1.0, 0.5, 0.1))
        assert both.value_estimators() == (gae,)
        assert torch.equal(both.value_targets(self.data()), gae.value_targets(self.data()))

    def test_of_two_are_refused(self):
        both = Combined(estimators=(GAE(discount=0.9), GAE(discount=0.8)))
        with pytest.raises(CapabilityError, match=r"2 different estimators that read a critic \(GAE, GAE\)"):
            both.value_targets(self.data())

    def test_of_none_are_refused(self):
        with pytest.raises(CapabilityError, match="Combined reads no critic"):
            Combined(estimators=(GRPO(),)).value_targets(self.data())


class TestTeacherSignal:
    @both_layouts
    def test_is_the_difference_of_log_probabilities(self, kind):
        found = rows_of(final(TeacherSignal(coef=0.5), rollouts(kind)), MASK, kind)
        for row, expected in zip(
            found, [[0.05, 0.25, -0.05], [0.35, -0.3, 0.0], [0.0, -0.125], [-0.05]], strict=True
        ):
            close(row, expected)

    def test_added_to_an_outcome_advantage(self):
        # d = log π − log π_teacher of [0.1, −0.8, 0.2 | −0.2, 0.2], advantages 1.2 and −0.8, half of d taken off.
        data = rollouts_of(
            [[1, 1, 1], [1, 1, 0]],
            [1.2, -0.8],
            old_logprobs=[[-0.8, -2.3, -0.4], [-1.0, -1.1, -9.0]],
            teacher_logprobs=[[-0.9, -1.5, -0.6], [-0.8, -1.3, 0.0]],
        )
        found = final(Combined(estimators=(Fixed(), TeacherSignal(coef=0.5))), data)
        close(found, [[1.15, 1.6, 1.1], [-0.7, -0.9, 0.0]])

    def test_needs_a_teacher(self):
        assert TeacherSignal().required().needs_teacher
        assert Combined(estimators=(GRPO(), TeacherSignal())).required().needs_teacher
        with pytest.raises(MissingColumnError, match="teacher_logprobs"):
            TeacherSignal().estimate(rollouts_of([[1]], [1.0], old_logprobs=[[0.0]]))
        with pytest.raises(CapabilityError):
            TeacherSignal(coef=math.nan)


PARTS = (
    GRPO(),
    GRPO(scale="batch"),
    RLOO(),
    GDPO(weights=(1.0, 0.5)),
    GPG(),
    BatchBaseline(),
    ReinforcePlusPlusBaseline(),
    TeacherSignal(),
    TeacherSignal(normalize="window"),
)


class TestCombined:
    @both_layouts
    @pytest.mark.parametrize("one", PARTS, ids=repr)
    @pytest.mark.parametrize("other", [GRPO(), GDPO(), TeacherSignal(normalize="window")], ids=repr)
    def test_each_keeps_its_own_normalisation(self, kind, one, other):
        data = rollouts(kind)
        expected = 2.0 * final(one, data) - 0.5 * final(other, data)
        close(final(Combined(estimators=(one, other), weights=(2.0, -0.5)), data), expected, 1e-12)

    @both_layouts
    def test_rows_travel_through_micro_batches_of_any_layout(self, kind):
        data = rollouts(kind)
        estimator = Combined(estimators=(GDPO(), TeacherSignal(normalize="window"), GRPO(scale="batch")))
        estimate, layout = estimator.estimate(data), data.layout
        whole = Objective(estimator=estimator).freeze([(estimate, layout)]).advantages(estimate, layout)
        cut = [
            (layout.rows_of(estimate, rows), layout.rows(rows))
            for rows in (torch.tensor([2, 0]), torch.tensor([3, 1]))
        ]
        window = Objective(estimator=estimator).freeze(cut)
        for (part, own), rows in zip(cut, ([2, 0], [3, 1]), strict=True):
            close(window.advantages(part, own), layout.rows_of(whole, torch.tensor(rows)), 1e-12)

    def test_the_first_column_is_the_weighted_raw_sum(self):
        found = Combined(estimators=(GRPO(scale="none"), RLOO()), weights=(1.0, 0.5)).estimate(
            Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        )
        close(found, [[1.0, 0.5, 1.0], [-1.0, -0.5, -1.0]])

    def test_capabilities_and_declarations_merge(self):
        both = Combined(estimators=(GRPO(), GAE(normalize="window")))
        assert both.token_level and both.columns == 3
        assert both.required().needs_critic and both.required().min_group_size == 2
        assert set(both.declared_statistics()) == {"1/moments", "1/highest", "1/lowest"}
        assert not Combined(estimators=(GRPO(), RLOO())).token_level
        objective = Objective(estimator=both)
        with pytest.raises(CapabilityError, match="whitens advantages itself"):
            objective.check(TrainerFacts(normalize_advantages=True, offers={"values": True}))
        # A per-sequence statistic cannot be told from the tokens of one context rank.
        assert not Combined(estimators=(GDPO(), TeacherSignal())).required().supports_context_parallel
        assert Combined(estimators=(GRPO(), TeacherSignal())).required().supports_context_parallel

    def test_signal_is_judged_on_the_sum(self):
        data = Rollouts(rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]), group_ids=torch.tensor([7, 7, 2, 2]))
        assert Combined(estimators=(GRPO(), RLOO())).carries_signal(data).tolist() == [False, True]

    def test_a_sequence_without_any_position_is_refused_where_it_would_be_missed(self):
        layout = PackedLayout(torch.tensor([0, 1, 1]), torch.tensor([True]))
        data = Rollouts(
            rewards=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
            group_ids=torch.tensor([7, 7]),
            layout=layout,
            old_logprobs=torch.zeros(1),
            teacher_logprobs=torch.zeros(1),
        )
        with pytest.raises(CapabilityError, match="no position at all"):
            Combined(estimators=(GDPO(), TeacherSignal())).estimate(data)
        Combined(estimators=(GRPO(weights=(1.0, 0.0)), TeacherSignal())).estimate(data)

    @pytest.mark.parametrize(
        "layout",
        [
            PackedLayout(torch.tensor([0]), torch.zeros(0, dtype=torch.bool)),
            PaddedLayout(torch.zeros(0, 0, dtype=torch.bool)),
        ],
        ids=repr,
    )
    def test_an_idle_rank_misses_nothing(self, layout):
        empty, none = torch.zeros(layout.shape), torch.zeros(0, dtype=torch.int64)
        data = Rollouts(rewards=torch.zeros(0, 2), group_ids=none, layout=layout, old_logprobs=empty,
                        teacher_logprobs=empty)  # fmt: skip
        objective = Objective(estimator=Combined(estimators=(GDPO(), TeacherSignal())))
        estimate = objective.estimator.estimate(data)
        assert objective.freeze([(estimate, layout)]).advantages(estimate, layout).shape == layout.shape

    def test_bad_options_are_refused(self):
        for options in (
            {},
            {"estimators": (GRPO,)},
            {"estimators": GRPO()},
            {"estimators": (GRPO(),), "weights": 1.0},
            {"estimators": (Combined(estimators=(GRPO(),)),)},
            {"estimators": (GRPO(),), "weights": (1.0, 2.0)},
            {"estimators": (GRPO(),), "weights": (math.nan,)},
        ):
            with pytest.raises(CapabilityError):
                Combined(**options)

    def test_undeclared_columns_are_refused(self):
        class Wide(Fixed):
            def estimate(self, rollouts):
                return rollouts.rewards

        with pytest.raises(CapabilityError, match="gives 2 columns but declares 1"):
            Combined(estimators=(Wide(),)).estimate(rollouts())


def whiten_shard(values: list[float], ddof: int) -> list[float]:
    """One context rank's tokens of the one sequence."""
    layout = PaddedLayout(torch.ones(1, len(values), dtype=torch.bool), total_tokens=torch.tensor([4.0]))
    data = Rollouts(
        rewards=torch.zeros(1),
        group_ids=torch.tensor([0]),
        layout=layout,
        old_logprobs=torch.full((1, len(values)), -16.0, dtype=torch.float64),
        teacher_logprobs=torch.tensor([values], dtype=torch.float64) - 16.0,
    )
    estimator = TeacherSignal(normalize="window", ddof=ddof, epsilon_mode="add")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    communicator = Communicator.world(context_group=dist.group.WORLD) if world > 1 else Communicator()
    estimate = estimator.estimate(data)
    window = Objective(estimator=estimator).freeze([(estimate, layout)], communicator)
    assert communicator.owns_sequences == (rank == 0)
    return window.advantages(estimate, layout).flatten().tolist()


def whiten_on_rank(shards: list[list[float]], ddof: int) -> list[float]:
    return whiten_shard(shards[dist.get_rank()], ddof)


WHITENED = {
    1: [-0.7348469228349533, -0.4898979485566356, -0.2449489742783178, 1.4696938456699067],
    0: [-0.848528137423857, -0.565685424949238, -0.282842712474619, 1.697056274847714],
}


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_counts_the_tokens_of_all_context_ranks(ddof):
    parts = run_ranks(whiten_on_rank, 2, [[1.0, 2.0], [3.0, 10.0]], ddof)
    close([x for part in parts for x in part], WHITENED[ddof], 1e-7)
    close(whiten_shard([1.0, 2.0, 3.0, 10.0], ddof), WHITENED[ddof], 1e-7)


def test_helpers_lay_columns_like_layouts():
    assert layout_of(MASK).num_sequences == 4
    assert column([[1.0], [2.0, 3.0]], "packed").tolist() == [1.0, 2.0, 3.0]
