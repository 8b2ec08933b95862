"""Columns of a user's own: from the data through micro-batches, blocks, packing and ranks into a part."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlobjectives import (
    GRPO,
    Capabilities,
    CapabilityError,
    Column,
    Communicator,
    KLPenalty,
    MissingColumnError,
    NonFiniteError,
    Objective,
    PackedLayout,
    PaddedLayout,
    Reinforce,
    Rollouts,
    ShapeError,
    TokenBatch,
    TokenTerm,
    TrainerFacts,
    read,
)
from rlobjectives.packing import Packing
from rlobjectives.testing import check_part
from rlobjectives.testing.cases import Case, MicroBatch, Shard, draw_case
from rlobjectives.testing.compare import assert_same
from rlobjectives.testing.simulate import Outcome, run_window, simulate, together, whole
from tests.own_columns import CONFIDENCE, OBJECTIVE, SCORE, ByConfidence, FromMarks, Gated, Marked
from tests.ranks import RankFailure, run_ranks

CASE = draw_case(3, (3, 4, 2), width=6, empty_rows=0.2, dropped=0.2).with_own(
    {"confidence": CONFIDENCE, "score": SCORE}, {"score": SCORE}
)
RANKS = [
    [MicroBatch((0, 8, 3), Shard(packed=True)), MicroBatch(()), MicroBatch((5, 1), Shard(extra=3))],
    [MicroBatch((2, 4, 6, 7), Shard(garbage=float("nan")))],
]


def by_hand(case: Case) -> tuple[float, list[list[float]]]:
    """The loss and its gradient in each log-probability, token by token."""
    mask, logprobs = case.mask.tolist(), case.columns["logprobs"].tolist()
    confidence, score = case.columns["confidence"].tolist(), case.facts["score"].tolist()
    rewards, scored = case.rewards.tolist(), case.scored.tolist()
    count = sum(sum(row) for row in mask)
    total, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        advantage = sum(r for r, known in zip(rewards[i], scored[i], strict=True) if known) + score[i]
        for t, counts in enumerate(row):
            if counts:
                slope = -advantage * confidence[i][t] + 0.5 * score[i]
                total += slope * logprobs[i][t] / count
                gradient[i][t] = slope / count
    return total, gradient


def agrees(found: Outcome) -> None:
    loss, gradient = by_hand(CASE)
    torch.testing.assert_close(found.loss.item(), loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        found.gradients["logprobs"], torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("shard", [Shard(), Shard(packed=True), Shard(extra=2, garbage=float("nan"))])
def test_a_window_in_one_piece_is_that_of_plain_loops(shard: Shard) -> None:
    agrees(whole(OBJECTIVE, CASE, shard))


def test_any_cut_gives_the_same() -> None:
    found = together(simulate(OBJECTIVE, CASE, RANKS))
    agrees(found)
    assert_same(found, whole(OBJECTIVE, CASE), 1e-12)


def run_grid() -> Outcome:
    estimate = OBJECTIVE.estimator.estimate(CASE.rollouts())
    return run_window(OBJECTIVE, CASE, RANKS[dist.get_rank()], estimate, Communicator.world())


def test_real_ranks_give_the_same() -> None:
    agrees(together(run_ranks(run_grid, 2)))


def test_blocks_of_a_large_micro_batch_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before = PaddedLayout.blocks
    monkeypatch.setattr(PaddedLayout, "blocks", lambda self, limit=None: before(self, 2 * self.width))
    assert len(list(CASE.layout().blocks())) > 2
    agrees(whole(OBJECTIVE, CASE))


@pytest.mark.parametrize("part", [ByConfidence(), Marked(), FromMarks(), Gated(), OBJECTIVE], ids=repr)
def test_they_pass_every_law(part: object) -> None:
    check_part(part).raise_if_failed()


LAYOUT = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))


def window_of(objective: Objective, tokens: TokenBatch) -> Tensor:
    window = objective.freeze([(torch.ones(tokens.num_sequences).double(), tokens.layout)])
    output = window.loss(tokens.replace(advantages=torch.ones(tokens.layout.shape).double()))
    window.summarize([output])
    return output.loss


class TestMisuse:
    OBJECTIVE = Objective(estimator=GRPO(), policy_loss=Reinforce(), correction=ByConfidence())

    def tokens(self, **extra: Tensor) -> TokenBatch:
        return TokenBatch(logprobs=-torch.ones(2, 3), layout=LAYOUT, extra=extra)

    def test_one_that_is_missing_is_named_with_its_reader(self) -> None:
        with pytest.raises(
            MissingColumnError, match=r"ByConfidence reads confidence, .* TokenBatch\(extra=\{'confidence': "
        ):
            window_of(self.OBJECTIVE, self.tokens())

    def test_one_that_nothing_reads_is_refused(self) -> None:
        with pytest.raises(
            MissingColumnError, match="reads the column 'confidance' .* Did you mean 'confidence'"
        ):
            window_of(self.OBJECTIVE, self.tokens(confidence=torch.ones(2, 3), confidance=torch.ones(2, 3)))
        rollouts = Rollouts(
            rewards=torch.ones(2), group_ids=torch.zeros(2).long(), extra={"scores": torch.ones(2)}
        )
        builder = Objective(estimator=FromMarks()).window()
        builder.estimate(rollouts)
        with pytest.raises(MissingColumnError, match="'scores' in extra. Did you mean 'score'"):
            builder.freeze()

    def test_one_with_nan_at_a_token_that_counts_is_an_error_and_elsewhere_not(self) -> None:
        spoiled = torch.ones(2, 3)
        spoiled[0, 2] = torch.nan
        window_of(self.OBJECTIVE, self.tokens(confidence=spoiled))
        spoiled[0, 1] = torch.nan
        with pytest.raises(NonFiniteError, match="confidence has 1 non-finite values among 3"):
            window_of(self.OBJECTIVE, self.tokens(confidence=spoiled))

    def test_one_per_sequence_is_judged_where_sequences_count(self) -> None:
        objective = Objective(estimator=GRPO(), policy_loss=Reinforce(), terms=(Marked(),))
        nothing = PaddedLayout(
            torch.tensor([[True, True, False], [False, False, False]]),
            sequence_mask=torch.tensor([True, False]),
        )
        tokens = TokenBatch(
            logprobs=-torch.ones(2, 3), layout=nothing, extra={"score": torch.tensor([1.0, torch.nan])}
        )
        assert window_of(objective, tokens).isfinite()
        with pytest.raises(NonFiniteError, match="score has 1 non-finite values among 2"):
            window_of(
                objective, tokens.replace(layout=LAYOUT.with_facts(score=torch.tensor([1.0, torch.nan])))
            )

    def test_shapes(self) -> None:
        with pytest.raises(
            ShapeError,
            match=r"extra\['confidence'\] has shape \[3\]; expected \[2, 3\], one entry per token. .* column of 2 entries",
        ):
            self.tokens(confidence=torch.ones(3))
        with pytest.raises(ShapeError, match="extra has 'values', which TokenBatch has itself"):
            self.tokens(values=torch.ones(2, 3))
        with pytest.raises(ShapeError, match=r"layout.with_facts\(score=...\)"):
            packed = PackedLayout(torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.bool))
            TokenBatch(logprobs=-torch.ones(3), layout=packed, extra={"score": torch.ones(2)})

    def test_rollouts_are_checked_at_the_boundary(self) -> None:
        with pytest.raises(NonFiniteError, match=r"extra\['score'\]"):
            Rollouts(
                rewards=torch.ones(2),
                group_ids=torch.zeros(2).long(),
                extra={"score": torch.tensor([1.0, torch.inf])},
            )

    def test_a_name_that_the_library_has(self) -> None:
        with pytest.raises(CapabilityError, match="The library has a column 'values' itself"):
            read(Column("values", "mine"))
        with pytest.raises(CapabilityError, match="There is no column 'valeus'. Did you mean 'values'"):
            read("valeus")

    def test_two_parts_that_mean_different_columns_by_one_name(self) -> None:
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Other(Marked):
            reads = (Column("confidence", "something else", per="sequence"),)

        with pytest.raises(
            CapabilityError, match="Two parts read a column 'confidence' and mean different ones"
        ):
            Objective(estimator=GRPO(), correction=ByConfidence(), terms=(Other(),))

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("confidense", "There is no column 'confidense'.*declared whole: Column"),
            (3, "3 is no column; expected a name, a Column or read"),
            (None, "None is no column"),
        ],
    )
    def test_what_is_no_column_is_refused_when_the_objective_is_made(
        self, wrong: object, message: str
    ) -> None:
        kind = type("Odd", (Marked,), {"reads": (wrong,)})
        with pytest.raises(CapabilityError, match=message):
            Objective(estimator=GRPO(), terms=(kind(),))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("a b",), "A column is called 'a b'; expected an identifier"),
            ((3,), "A column is called 3"),
            (("a", "", "row"), "per of column 'a' is 'row'; expected one of 'token', 'sequence'"),
        ],
    )
    def test_what_no_column_can_be(self, arguments: tuple[str, ...], message: str) -> None:
        with pytest.raises(CapabilityError, match=message):
            Column(*arguments)


def break_one() -> None:
    layout = PaddedLayout(torch.ones(1, 2, dtype=torch.bool))
    confidence = torch.ones(1, 2)
    if dist.get_rank() == 1:
        confidence[0, 0] = torch.nan
    tokens = TokenBatch(logprobs=-torch.ones(1, 2), layout=layout, extra={"confidence": confidence})
    window_of(TestMisuse.OBJECTIVE, tokens)


def test_one_that_is_broken_on_one_rank_is_an_error_of_all() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(break_one, 2)
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert "rank 1, micro-batch 0: confidence has 1 non-finite" in str(error)


def test_a_column_with_gradient_gets_its_slope() -> None:
    gate = torch.tensor([[0.5, -1.0, 7.0], [2.0, 7.0, 7.0]], dtype=torch.float64, requires_grad=True)
    tokens = TokenBatch(logprobs=-torch.ones(2, 3).double(), layout=LAYOUT, extra={"gate": gate})
    window_of(Objective(estimator=GRPO(), policy_loss=Reinforce(), terms=(Gated(),)), tokens).backward()
    expected = torch.tensor([[1.0, -2.0, 0.0], [4.0, 0.0, 0.0]]).double() / 3
    torch.testing.assert_close(gate.grad, expected)


def test_a_fact_of_the_layout_is_read_like_a_column_per_sequence() -> None:
    tokens = TokenBatch(logprobs=-torch.ones(2, 3), layout=LAYOUT.with_facts(score=torch.tensor([1.0, 2.0])))
    assert tokens.need("score", Marked()).tolist() == [1.0, 2.0]


def test_packing_takes_them_along() -> None:
    ids = torch.tensor([[1, 1, 0], [1, 0, 0]])
    packing = Packing(ids.bool())
    column = torch.tensor([[0.1, 0.2, 9.0], [0.3, 9.0, 9.0]])
    tokens = TokenBatch(
        logprobs=-packing.pack(torch.ones(2, 3)),
        layout=packing.layout(LAYOUT.with_facts(score=torch.tensor([1.0, 2.0]))),
        extra={"confidence": packing.pack(column)},
    )
    assert tokens.extra["confidence"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert tokens.block(slice(1, 2), slice(2, 3)).need("score", "a test").tolist() == [2.0]


class TestWhatTheTrainerOffers:
    def test_a_column_that_it_cannot_give_is_refused_at_set_up(self) -> None:
        objective = TestMisuse.OBJECTIVE
        objective.check(TrainerFacts())
        objective.check(TrainerFacts(offers={"confidence": True}))
        with pytest.raises(
            CapabilityError, match=r"it needs how sure the tool was .* \(confidence\); the trainer has none"
        ):
            objective.check(TrainerFacts(offers={"confidence": False}))

    @pytest.mark.parametrize(
        ("flag", "column"),
        [("has_critic", "values"), ("has_reference", "ref_logprobs"), ("has_teacher", "teacher_logprobs")],
    )
    def test_flags_of_the_version_before(self, flag: str, column: str) -> None:
        with pytest.warns(DeprecationWarning, match=f"{flag}.*: name columns in offers"):
            facts = TrainerFacts(**{flag: False})
        assert facts.gives(column) is False and getattr(facts, flag) is False
        assert getattr(TrainerFacts(), flag) is None

    @pytest.mark.parametrize(
        ("flag", "column"),
        [
            ("needs_critic", "values"),
            ("needs_behavior_logprobs", "behavior_logprobs"),
            ("needs_ref_logprobs", "ref_logprobs"),
            ("needs_teacher", "teacher_logprobs"),
        ],
    )
    def test_needs_of_the_version_before(self, flag: str, column: str) -> None:
        with pytest.warns(DeprecationWarning, match=f"{flag}.*: name columns in reads"):
            needs = Capabilities(**{flag: True})
        assert needs.reads == {column} and getattr(needs, flag)
        assert not getattr(Capabilities(), flag)

    def test_a_part_that_tolerates_unknown_tokens_in_the_words_before(self) -> None:
        class Lenient(KLPenalty):
            def tolerates(self) -> tuple[str, ...]:
                return ("teacher_logprobs",)

        with pytest.warns(
            DeprecationWarning, match=r"Lenient.tolerates: write reads = \(read\('teacher_logprobs', unknown"
        ):
            assert Objective(estimator=GRPO(), kl=Lenient(coef=0.1)).reads()["teacher_logprobs"].unknown


class TestContradictionsInTheWordsBefore:
    def test_with_other_parts(self) -> None:
        class Shy(Marked):
            def conflicts(self, parts):  # type: ignore[override]
                if "kl" in parts:
                    yield "it goes with no kl."

        with pytest.warns(DeprecationWarning, match=r"Shy: write one method conflicts\(self, parts, facts\)"):
            Objective(estimator=GRPO(), terms=(Shy(),))
        with (
            pytest.warns(DeprecationWarning, match="Shy"),
            pytest.raises(CapabilityError, match="it goes with no kl"),
        ):
            Objective(estimator=GRPO(), terms=(Shy(),), kl=KLPenalty(coef=0.1))

    def test_with_the_trainer(self) -> None:
        class Cold(Marked):
            def violations(self, facts: TrainerFacts) -> list[str]:
                return ["it needs temperature 1."] if facts.temperature not in (None, 1.0) else []

        with pytest.warns(DeprecationWarning, match="Cold"):
            objective = Objective(estimator=GRPO(), terms=(Cold(),))
        with (
            pytest.warns(DeprecationWarning, match="Cold"),
            pytest.raises(CapabilityError, match="it needs temperature 1"),
        ):
            objective.check(TrainerFacts(temperature=0.5))


def test_token_rewards_that_nothing_reads_are_refused() -> None:
    rollouts = Rollouts(
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        layout=LAYOUT,
        token_rewards=torch.ones(2, 3),
    )
    builder = Objective(estimator=GRPO()).window()
    builder.estimate(rollouts)
    with pytest.raises(CapabilityError, match="GRPO does not read token_rewards"):
        builder.freeze()


def test_nothing_warns_by_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [*TokenTerm().declared_reads()] == []
        assert TokenTerm().required() == Capabilities()
