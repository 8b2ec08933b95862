"""A window's life: collect, freeze, use, report; and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlobjectives import (
    GDPO,
    GRPO,
    Capabilities,
    ClippedSurrogate,
    Component,
    Estimator,
    Mean,
    Metric,
    MissingColumnError,
    Moments,
    NonFiniteError,
    Objective,
    PaddedLayout,
    PolicyLoss,
    RankError,
    Reinforce,
    ReverseKLDistillation,
    RLObjectivesError,
    Rollouts,
    SequenceMean,
    ShapeError,
    Stat,
    Sum,
    TokenBatch,
    TokenLoss,
    TokenMean,
    Window,
    WindowContext,
    WindowError,
    reward_metrics,
)
from rlobjectives.functional import weighted_sum
from rlobjectives.statistics.distributions import Histogram
from rlobjectives.testing.cases import MicroBatch, draw_case
from rlobjectives.testing.compare import assert_same
from rlobjectives.testing.simulate import CountingCommunicator, run_ranks_as_threads, simulate, together
from rlobjectives.testing.simulate import whole as run_whole

ADVANTAGE = torch.tensor([1.0, -2.0], dtype=torch.float64)
LAYOUT = PaddedLayout(torch.tensor([[True, True, True], [True, False, False]]))


def opened(objective: Objective) -> Window:
    return objective.freeze([(ADVANTAGE, LAYOUT)])


def tokens(window: Window, **columns: Any) -> TokenBatch:
    given = {"logprobs": torch.full((2, 3), -1.0, requires_grad=True), **columns}
    return TokenBatch(layout=LAYOUT, advantages=window.advantages(ADVANTAGE, LAYOUT), **given)


@dataclass(frozen=True, kw_only=True)
class Squared(PolicyLoss):
    """A user's loss that gives only its value: ``A·(ℓ − ℓᵒ)²`` of the sequence's sum, shared by its tokens."""

    whole: bool = False

    def value(self, tokens: TokenBatch, context: Any) -> Tensor:
        difference = tokens.logprobs - tokens.old()
        if self.whole:
            total = context.context_sum(tokens.layout.segment_sum(difference))
            difference = tokens.layout.expand(total)
        return tokens.need("advantages", "Squared") * difference**2


class TestUserLoss:
    def test_autograd_finds_the_slope(self) -> None:
        window = opened(Objective(estimator=GRPO(), policy_loss=Squared()))
        old = torch.tensor([[-1.5, -1.0, 0.0], [-3.0, torch.nan, torch.inf]])
        batch = tokens(window, old_logprobs=old)
        output = window.loss(batch)
        output.loss.backward()
        assert float(output.loss.detach()) == pytest.approx((0.25 + 0.0 + 1.0 - 2.0 * 4.0) / 4)
        expected = torch.tensor([[0.25, 0.0, -0.5], [-2.0, 0.0, 0.0]])
        assert torch.equal(batch.logprobs.grad, expected)
        assert window.summarize([output])["loss/policy"] == pytest.approx(float(output.loss.detach()))

    def test_it_works_under_no_grad(self) -> None:
        window = opened(Objective(estimator=GRPO(), policy_loss=Squared()))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert float(window.loss(tokens(window)).loss) == 0.0

    @pytest.mark.parametrize("whole", [False, True])
    def test_any_cut_gives_the_same(self, whole: bool) -> None:
        objective = Objective(estimator=GRPO(), policy_loss=Squared(whole=whole), reduction=SequenceMean())
        case = draw_case(4, (3, 3), empty_rows=0.0)
        expected = run_whole(objective, case)
        plan = [[MicroBatch((5, 0))], [MicroBatch((1,)), MicroBatch((2, 3, 4))]]
        for context in (1, 2):
            outcomes = simulate(objective, case, plan, context)
            assert not any(isinstance(one, Exception) for one in outcomes), outcomes
            assert_same(together(outcomes), expected, 1e-12)

    def test_a_loss_without_value_or_slope_says_so(self) -> None:
        class Nothing(PolicyLoss):
            pass

        window = opened(Objective(estimator=GRPO(), policy_loss=Nothing()))
        with pytest.raises(
            RLObjectivesError, match=r"Nothing gives neither value\(\) nor value_and_slope\(\)"
        ):
            window.loss(tokens(window))

    def test_shapes_are_never_broadcast(self) -> None:
        class Narrow(PolicyLoss):
            def value_and_slope(self, tokens: TokenBatch, context: Any) -> TokenLoss:
                full, narrow = torch.zeros(2, 3), torch.zeros(2, 1)
                return TokenLoss(narrow, full) if tokens.old_logprobs is None else TokenLoss(full, narrow)

        window = opened(Objective(estimator=GRPO(), policy_loss=Narrow()))
        with pytest.raises(ShapeError, match="Narrow value has shape"):
            window.loss(tokens(window))
        with pytest.raises(ShapeError, match="Narrow slope has shape"):
            window.loss(tokens(window, old_logprobs=torch.zeros(2, 3)))

    def test_a_slope_that_is_not_finite_is_an_error(self) -> None:
        class Root(PolicyLoss):
            def value(self, tokens: TokenBatch, context: Any) -> Tensor:
                return (tokens.logprobs - tokens.old()).abs().sqrt()

        window = opened(Objective(estimator=GRPO(), policy_loss=Root()))
        output = window.loss(tokens(window))
        with pytest.raises(NonFiniteError, match="slope has 4 non-finite values among 4"):
            window.summarize([output])

    def test_undeclared_statistics_are_refused_on_every_rank(self) -> None:
        class Chatty(PolicyLoss):
            metrics: ClassVar[dict[str, Metric]] = {"policy/mine": Metric(Mean, "x", "a mean")}

            def value_and_slope(self, tokens: TokenBatch, context: Any) -> TokenLoss:
                return TokenLoss(tokens.logprobs, tokens.logprobs, {"policy/mine": Sum.of(tokens.logprobs)})

        window = opened(Objective(estimator=GRPO(), policy_loss=Chatty()))
        with pytest.raises(WindowError, match="'policy/mine' is a Sum, but Mean was declared"):
            window.summarize([window.loss(tokens(window))])


class TestOneAutogradFunction:
    def test_higher_derivatives_are_refused(self) -> None:
        window = opened(Objective(estimator=GRPO()))
        batch = tokens(window)
        (gradient,) = torch.autograd.grad(window.loss(batch).loss, batch.logprobs, create_graph=True)
        with pytest.raises(RuntimeError):
            gradient.sum().backward()

    def test_the_incoming_gradient_scales_it(self) -> None:
        leaf = torch.zeros(2, 3, requires_grad=True)
        one = torch.ones(2, 3)
        (7.0 * weighted_sum(leaf, one, 2.0 * one, 0.5 * one, LAYOUT)).backward()
        assert torch.equal(leaf.grad, torch.where(LAYOUT.mask, 7.0, 0.0))

    def test_masked_values_slopes_and_weights_may_be_anything(self) -> None:
        leaf = torch.zeros(2, 3, requires_grad=True)
        dirty = torch.where(LAYOUT.mask, 1.0, torch.nan)
        loss = weighted_sum(leaf, dirty, dirty, dirty, LAYOUT)
        loss.backward()
        assert float(loss.detach()) == 4.0
        assert torch.equal(leaf.grad, LAYOUT.mask.float())

    def test_autocast_changes_nothing(self) -> None:
        window = opened(Objective(estimator=GRPO(), entropy_coef=0.1))
        plain = window.loss(tokens(window, entropy=torch.ones(2, 3)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = window.loss(tokens(window, entropy=torch.ones(2, 3)))
        assert cast.loss.dtype == torch.float32
        assert torch.equal(plain.loss, cast.loss)


class TestEntropyBonus:
    def test_it_is_weighted_by_the_reduction_and_has_its_gradient(self) -> None:
        objective = Objective(
            estimator=GRPO(), policy_loss=Reinforce(), reduction=SequenceMean(), entropy_coef=0.5
        )
        window = opened(objective)
        entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, torch.nan, torch.inf]], requires_grad=True)
        output = window.loss(tokens(window, entropy=entropy))
        output.loss.backward()
        metrics = window.summarize([output])
        assert metrics["loss/entropy"] == pytest.approx(-0.5 * (2.0 + 4.0) / 2)
        assert metrics["policy/entropy"] == pytest.approx(2.5)
        assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + metrics["loss/entropy"])
        assert torch.allclose(entropy.grad, torch.tensor([[-1 / 12] * 3, [-0.25, 0.0, 0.0]]))

    def test_published_entropy_of_logits(self) -> None:
        logits = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
        entropy = torch.logsumexp(logits, 0) - (logits.softmax(0) * logits).sum()
        layout = PaddedLayout(torch.tensor([[True]]))
        objective = Objective(estimator=GRPO(), policy_loss=Reinforce(), entropy_coef=1.0)
        window = objective.freeze([(torch.zeros(1), layout)])
        batch = TokenBatch(
            logprobs=torch.zeros(1, 1, dtype=torch.float64),
            advantages=torch.zeros(1, 1),
            entropy=entropy.reshape(1, 1),
            layout=layout,
        )
        loss = window.loss(batch).loss
        loss.backward()
        assert float(loss.detach()) == pytest.approx(-0.905959256479, abs=1e-12)
        expected = [-0.129117627448, 0.277553618787, -0.148435991339]
        assert logits.grad.tolist() == pytest.approx(expected, abs=1e-12)

    def test_it_needs_its_column(self) -> None:
        window = opened(Objective(estimator=GRPO(), entropy_coef=0.1))
        with pytest.raises(MissingColumnError, match="entropy bonus reads entropy"):
            window.loss(tokens(window))


class TestLifeCycle:
    def test_nothing_is_added_to_a_frozen_window(self) -> None:
        builder = Objective(estimator=GRPO()).window()
        builder.add(estimate=ADVANTAGE, layout=LAYOUT)
        builder.freeze()
        with pytest.raises(WindowError, match="frozen"):
            builder.add(estimate=ADVANTAGE, layout=LAYOUT)

    def test_an_estimate_must_match_its_layout(self) -> None:
        for estimate in (torch.zeros(3), torch.zeros(2, 3, 1), torch.zeros(1)):
            with pytest.raises(ShapeError, match="one row per sequence of the layout"):
                Objective(estimator=GRPO()).freeze([(estimate, LAYOUT)])

    def test_the_losses_must_see_the_tokens_of_the_window(self) -> None:
        window = opened(Objective(estimator=GRPO()))
        output = window.loss(tokens(window))
        with pytest.raises(WindowError, match="the losses saw 8 tokens, but the window was frozen with 4"):
            window.summarize([output, output])
        fewer = PaddedLayout(LAYOUT.mask & torch.tensor([True, True, False]))
        changed = window.loss(tokens(window).replace(layout=fewer))
        with pytest.raises(WindowError, match="saw 3 tokens"):
            window.summarize([changed])
        with pytest.raises(WindowError, match="saw 0 tokens"):
            window.summarize([])

    def test_a_forgotten_micro_batch_is_told_to_every_rank(self) -> None:
        objective = Objective(estimator=GRPO())

        def one(communicator: Any) -> Any:
            window = objective.freeze([(ADVANTAGE, LAYOUT)] * 2, communicator)
            outputs = [window.loss(tokens(window)) for _ in range(2 - communicator.rank)]
            return window.summarize(outputs)

        for error in run_ranks_as_threads(one, 2):
            assert isinstance(error, WindowError)
            assert "saw 12 tokens, but the window was frozen with 16" in str(error)

    def test_extra_statistics_ride_along_under_their_own_names(self) -> None:
        communicator = CountingCommunicator()
        window = Objective(estimator=GRPO()).freeze([(ADVANTAGE, LAYOUT)], communicator)
        output = window.loss(tokens(window))
        found = window.summarize([output], {"mine": Sum.of(torch.ones(3))})
        assert (found["mine"], communicator.collectives) == (3.0, 2)
        with pytest.raises(WindowError, match=r"extra holds \['policy/clip_fraction'\]"):
            window.summarize([output], {"policy/clip_fraction": Sum.of(torch.ones(3))})

    def test_extra_statistics_of_sequences_count_once_over_context_ranks(self) -> None:
        objective = Objective(estimator=GRPO())
        layout = LAYOUT.with_facts(total_tokens=torch.tensor([6.0, 2.0]))

        def one(communicator: Any) -> Any:
            window = objective.freeze([(ADVANTAGE, layout)], communicator)
            rollouts = Rollouts(rewards=torch.tensor([1.0, 2.0]), group_ids=torch.tensor([0, 0]))
            output = window.loss(tokens(window).replace(layout=layout))
            return window.summarize([output], reward_metrics(rollouts))

        found = run_ranks_as_threads(one, 2, context=2)
        assert found[0] == found[1]
        assert found[0]["reward/reward_0/std"] == pytest.approx(math.sqrt(0.5))

    def test_a_shard_of_unknown_length_is_refused(self) -> None:
        def one(communicator: Any) -> Any:
            return Objective(estimator=GRPO(), reduction=SequenceMean()).freeze(
                [(ADVANTAGE, LAYOUT)], communicator
            )

        for error in run_ranks_as_threads(one, 2, context=2):
            assert isinstance(error, MissingColumnError)
            assert "full_token_counts" in str(error)

    def test_a_rank_without_micro_batches_joins(self) -> None:
        objective = Objective(estimator=GDPO())
        case = draw_case(2, (3, 2))
        outcomes = simulate(objective, case, [[], [MicroBatch(tuple(range(5)))], []])
        assert [one.collectives for one in outcomes] == [[2], [2], [2]]
        assert outcomes[1].metrics == outcomes[0].metrics == run_whole(objective, case).metrics

    def test_a_dummy_sequence_may_have_any_estimate(self) -> None:
        layout = LAYOUT.with_facts(sequence_mask=torch.tensor([True, False]))
        estimate = torch.tensor([[1.0, 1.0, 1.0], [math.nan, math.nan, math.nan]], dtype=torch.float64)
        with pytest.warns(UserWarning, match="fewer than two that count"):
            window = Objective(estimator=GDPO()).freeze([(estimate, layout)])
        assert window.context("estimator")["combined"].row.tolist() == [1.0, 1.0, 0.0]
        with pytest.raises(
            NonFiniteError, match="rank 0, micro-batch 0: estimate has 3 non-finite values among 6"
        ):
            Objective(estimator=GDPO()).freeze([(estimate, LAYOUT)])

    def test_a_non_finite_advantage_is_named(self) -> None:
        window = opened(Objective(estimator=GRPO()))
        batch = tokens(window).replace(
            advantages=torch.tensor([[0.0, torch.nan, 0.0], [0.0, torch.nan, 0.0]])
        )
        with pytest.raises(NonFiniteError, match="advantages has 1 non-finite values among 4"):
            window.summarize([window.loss(batch)])

    def test_only_the_first_failure_of_a_rank_is_raised_there(self) -> None:
        builder = Objective(estimator=GRPO()).window()
        for message in ("first", "second"):
            with builder.guard():
                raise KeyError(message)
        with pytest.raises(KeyError, match="first"):
            builder.freeze()

    def test_ranks_with_other_objectives_find_out(self) -> None:
        def one(communicator: Any) -> Any:
            estimator = GDPO() if communicator.rank else GRPO()
            return Objective(estimator=estimator).window(communicator).freeze()

        for error in run_ranks_as_threads(one, 3):
            assert isinstance(error, RankError)
            assert "(rank 0 / ranks 1, 2)" in str(error)

    def test_a_missing_column_names_its_reader(self) -> None:
        window = opened(Objective(estimator=GRPO()))
        with pytest.raises(MissingColumnError, match="ClippedSurrogate reads advantages"):
            window.loss(tokens(window).replace(advantages=None))

    def test_parts_that_contradict_each_other(self) -> None:
        class ByToken(TokenMean):
            token_level: ClassVar[bool] = True

        class Whole(ClippedSurrogate):
            sequence_level: ClassVar[bool] = True

        with pytest.raises(RLObjectivesError, match="one loss for all tokens of a sequence"):
            Objective(estimator=GRPO(), policy_loss=Whole(), reduction=ByToken())


def test_a_context_knows_only_what_was_declared() -> None:
    window = opened(Objective(estimator=GRPO()))
    with pytest.raises(WindowError, match="No window statistic 'rewards'; this part has none"):
        window.context("estimator")["rewards"]
    assert Capabilities() == Component.capabilities


def test_a_statistic_is_read_as_the_kind_it_was_declared_as() -> None:
    moments = Moments.of(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    context = WindowContext(
        tokens=moments.weight,
        sequences=moments.weight,
        nonempty_sequences=moments.weight,
        statistics={"rewards": moments},
    )
    assert context.get("rewards", Moments).mean == 2.0
    with pytest.raises(WindowError, match="statistic 'rewards' is Moments; expected Histogram"):
        context.get("rewards", Histogram)
    with pytest.raises(WindowError, match="No window statistic 'reward'; this part has \\['rewards'\\]"):
        context.get("reward", Moments)


def test_advantages_are_reported_as_the_loss_reads_them() -> None:
    """What a distillation term puts in their place, not what stood there before."""
    teacher = ReverseKLDistillation(coef=1.0, replace=True)
    objective = Objective(estimator=GRPO(), distillation=teacher)
    window = objective.freeze([(0.0 * ADVANTAGE, LAYOUT)])
    columns = {"teacher_logprobs": torch.full((2, 3), -1.5), "old_logprobs": torch.full((2, 3), -1.0)}
    batch = TokenBatch(
        layout=LAYOUT,
        advantages=window.advantages(0.0 * ADVANTAGE, LAYOUT),
        logprobs=torch.full((2, 3), -1.0, requires_grad=True),
        **columns,
    )
    found = window.summarize([window.loss(batch)])
    assert found["advantage/mean"] == pytest.approx(-0.5)
    assert found["advantage/zero_fraction"] == 0.0


class LooksLikeALoss(PolicyLoss):
    """Reports what it would be without its weight, under a name among the loss's own."""

    metrics: ClassVar = {"loss/unweighted": Metric(Sum, "loss", "sum of the token losses")}

    def value_and_slope(self, tokens: TokenBatch, context: Any) -> TokenLoss:
        del context
        one = torch.ones_like(tokens.logprobs)
        return TokenLoss(one, one, {"loss/unweighted": Sum.of(one, tokens.layout.mask)})


def test_a_metric_named_like_a_loss_adds_nothing_to_it() -> None:
    window = opened(Objective(estimator=GRPO(), policy_loss=LooksLikeALoss(), reduction=TokenMean()))
    output = window.loss(tokens(window))
    assert float(output.loss.detach()) == 1.0
    report = window.summarize([output])
    assert (report["loss/total"], report["loss/policy"], report["loss/unweighted"]) == (1.0, 1.0, 4.0)


def test_columns_may_be_stored_time_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlobjectives.masking._WORTHWHILE", 0)
    window = opened(Objective(estimator=GRPO()))
    column = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    found = []
    for logprobs in (column.clone(), column.T.contiguous().T):
        leaf = logprobs.requires_grad_()
        output = window.loss(tokens(window, logprobs=leaf, old_logprobs=leaf.detach() + 0.1))
        output.loss.backward()
        assert leaf.grad is not None
        found.append((leaf.grad.tolist(), window.summarize([output])))
    assert found[0] == found[1]


class Whole(Estimator):
    """Advantages that are whole numbers."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return rollouts.rewards[:, 0].long()


def test_whole_numbers_become_advantages_as_they_are() -> None:
    rollouts = Rollouts(rewards=torch.tensor([2.0**24 + 2, -3.0]), group_ids=torch.tensor([0, 0]))
    objective = Objective(estimator=Whole())
    estimate = objective.estimator.estimate(rollouts) - 1
    found = objective.freeze([(estimate, LAYOUT)]).advantages(estimate, LAYOUT)
    assert found.dtype is torch.float64
    assert found.tolist() == [[2.0**24 + 1] * 3, [-4.0, 0.0, 0.0]]


def test_a_statistic_that_is_declared_and_never_returned_is_refused():
    class Forgetful(Estimator):
        window_statistics: ClassVar[Mapping[str, type[Stat]]] = {"rewards": Moments}

        def estimate(self, rollouts):
            return rollouts.rewards.sum(1)

        def finalize(self, estimate, layout, context):
            return estimate - context["rewards"].mean

    layout = PaddedLayout(torch.ones(2, 1, dtype=torch.bool))
    estimate = torch.tensor([1.0, 0.0], dtype=torch.float64)
    with pytest.raises(WindowError, match=r"never returned 'estimator/rewards'"):
        Objective(estimator=Forgetful()).freeze([(estimate, layout)])
    Objective(estimator=Forgetful()).freeze([])  # a rank without data has nothing to return
