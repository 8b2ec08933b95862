"""Faults that users of other libraries reported, by kind, as requirements: the numbers that are right.

Each test names the fault it would catch. Where a report allows two conventions, this library's is the one here:
sample standard deviations (ddof 1), all sequences counted, fully masked ones included.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import (
    GDPO,
    GRPO,
    RLOO,
    ClippedSurrogate,
    FixedBudget,
    GradientScale,
    KLPenalty,
    Moments,
    Objective,
    PaddedLayout,
    PolicyLoss,
    Rollouts,
    SequenceMean,
    TokenBatch,
    TokenMean,
    reward_matrix,
    synchronize,
)
from rlobjectives.functional import kl_estimate, whiten
from rlobjectives.testing.simulate import run_ranks_as_threads


class Given(PolicyLoss):
    """The loss of each token is what the report says: its log-probability."""

    def value(self, tokens: TokenBatch, context: Any) -> Tensor:
        return tokens.logprobs


def micro_batch(losses: list[list[float]], mask: list[list[int]]) -> tuple[Tensor, PaddedLayout]:
    return torch.tensor(losses, dtype=torch.float64, requires_grad=True), PaddedLayout(
        torch.tensor(mask).bool()
    )


def step(reduction: Any, *batches: tuple[Tensor, PaddedLayout]) -> float:
    """Summed loss of one optimizer step; gradients accumulate in the leaves."""
    objective = Objective(estimator=GRPO(), policy_loss=Given(), reduction=reduction)
    window = objective.freeze([(torch.zeros(layout.num_sequences), layout) for _, layout in batches])
    total = 0.0
    for leaf, layout in batches:
        output = window.loss(TokenBatch(logprobs=leaf, layout=layout))
        output.loss.backward()
        total += float(output.loss.detach())
    return total


def estimate(part: Any, rewards: Any, ids: list[int], **columns: Any) -> list[float]:
    table = rewards if isinstance(rewards, Tensor) else torch.tensor(rewards)
    found = part.estimate(Rollouts(rewards=table, group_ids=torch.tensor(ids), **columns))
    return (found if found.dim() == 1 else found[:, 0]).tolist()


class TestDenominators:
    @pytest.mark.parametrize(
        ("reduction", "expected"),
        [(TokenMean(), 4.0), (SequenceMean(), 6.0), (FixedBudget(max_tokens=8), 1.0)],
    )
    def test_uneven_micro_batches(self, reduction: Any, expected: float) -> None:
        """Not 6 (mean of micro-batch means) and not 12 (not divided)."""
        batches = micro_batch([[1.0, 2.0, 3.0]], [[1, 1, 1]]), micro_batch([[10.0]], [[1]])
        assert step(reduction, *batches) == pytest.approx(expected, rel=1e-14)
        if isinstance(reduction, TokenMean):
            assert [grad for leaf, _ in batches for grad in leaf.grad.flatten().tolist()] == [0.25] * 4

    def test_the_window_is_the_optimizer_step_not_the_generation(self) -> None:
        """Four micro-steps of 4, 2, 1, 1 tokens in two steps: 1 and 1, not 0.75 and 0.25, not 1.5 and 0.5."""
        batches = [micro_batch([[1.0] * count], [[1] * count]) for count in (4, 2, 1, 1)]
        assert [step(TokenMean(), *batches[:2]), step(TokenMean(), *batches[2:])] == [1.0, 1.0]

    @pytest.mark.parametrize("width", [3, 4, 8])
    def test_a_fixed_budget_does_not_see_the_padding(self, width: int) -> None:
        """Not 1.0, 0.75, 0.375."""
        rows, mask = [[1.0, 1.0, 1.0], [1.5, 1.5, 0.0]], [[1, 1, 1], [1, 1, 0]]
        padded = [row + [9.0] * (width - 3) for row in rows], [row + [0] * (width - 3) for row in mask]
        assert step(FixedBudget(max_tokens=10), micro_batch(*padded)) == pytest.approx(0.3, rel=1e-14)

    def test_truncated_and_tool_tokens_leave_both_sums(self) -> None:
        """Not 0.75 (counted before the mask), not 17 (mask missing in the numerator)."""
        length = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        mask = (length * torch.tensor([[1], [0]])).tolist()
        assert step(TokenMean(), micro_batch([[1.0, 2.0, 3.0, 0.0, 0.0], [9.0] * 5], mask)) == 2.0


class TestRanks:
    def test_unequal_tokens_under_averaged_gradients(self) -> None:
        """5 tokens of −1 and one of −7: loss −2, gradient 1/6 of each token; not −4, not 1/12."""
        objective = Objective(estimator=GRPO(), policy_loss=Given())
        shards = [micro_batch([[-1.0] * 5], [[1] * 5]), micro_batch([[-7.0]], [[1]])]
        scale = GradientScale.for_ddp(2)

        def one(communicator: Any) -> tuple[float, list[float]]:
            leaf, layout = shards[communicator.rank]
            window = objective.freeze([(torch.zeros(1), layout)], communicator)
            output = window.loss(TokenBatch(logprobs=leaf, layout=layout))
            (output.loss * scale.factor).backward()
            return window.summarize([output])["loss/total"], (leaf.grad / 2).flatten().tolist()

        (first, grads), (second, other) = run_ranks_as_threads(one, 2)
        assert first == second == pytest.approx(-2.0, rel=1e-14)
        assert grads + other == pytest.approx([1 / 6] * 6, rel=1e-14)

    def test_whitening_spans_context_parallel_shards(self) -> None:
        """Not one affine transform for each slice of a sequence."""
        shards = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 10.0])]

        def one(communicator: Any) -> list[float]:
            values = shards[communicator.rank]
            moments = synchronize({"moments": Moments.of(values)}, communicator)["moments"]
            return whiten(values, moments, ddof=1, epsilon=0.0).tolist()

        expected = [-0.7348469228349533, -0.4898979485566356, -0.2449489742783178, 1.4696938456699067]
        assert sum(run_ranks_as_threads(one, 2), []) == pytest.approx(expected, rel=1e-12)


class TestEmptyAndMasked:
    @pytest.mark.parametrize("reduction", [TokenMean(), SequenceMean(), FixedBudget(max_tokens=2)])
    @pytest.mark.parametrize("part", [ClippedSurrogate(), Given()], ids=lambda part: type(part).__name__)
    def test_everything_masked(self, reduction: Any, part: Any) -> None:
        objective = Objective(estimator=GRPO(), policy_loss=part, reduction=reduction)
        leaf, layout = micro_batch([[5.0, 5.0], [5.0, 5.0]], [[0, 0], [0, 0]])
        window = objective.freeze([(torch.ones(2), layout)])
        output = window.loss(TokenBatch(logprobs=leaf, advantages=torch.ones(2, 2), layout=layout))
        assert output.loss.requires_grad
        output.loss.backward()
        assert float(output.loss.detach()) == 0.0
        assert leaf.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert window.empty
        assert all(math.isfinite(value) for value in window.summarize([output]).values())

    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
    def test_non_finite_under_the_mask(self, garbage: float) -> None:
        objective = Objective(
            estimator=GRPO(), policy_loss=ClippedSurrogate(), kl=KLPenalty(coef=0.1, estimator="k3")
        )
        layout = PaddedLayout(torch.tensor([[True, True, False]]))
        window = objective.freeze([(torch.ones(1), layout)])
        leaf = torch.tensor([[-1.0, -0.5, garbage]], requires_grad=True)
        tokens = TokenBatch(
            logprobs=leaf,
            old_logprobs=torch.tensor([[-1.0, -1.0, -200.0]]),
            ref_logprobs=torch.tensor([[-1.0, -1.0, -math.inf]]),
            advantages=torch.tensor([[1.0, 1.0, garbage]]),
            layout=layout,
        )
        output = window.loss(tokens)
        output.loss.backward()
        assert float(output.loss.detach()) == pytest.approx(-1.0946734670143685, rel=1e-6)
        assert leaf.grad.flatten().tolist() == pytest.approx([-0.5, 0.01967346701436833, 0.0], rel=1e-5)
        assert window.summarize([output])["policy/kl_to_ref"] == pytest.approx(0.05326532985631671, rel=1e-6)


class TestRange:
    def test_k3_in_the_right_direction_and_finite_far_out(self) -> None:
        pairs = torch.tensor([[-1.0, -2.0], [-2.0, -1.0], [-1.0, -1.0]])
        value, slope = kl_estimate(pairs[:, 0] - pairs[:, 1], "k3")
        assert value.tolist() == pytest.approx([0.36787944117144233, 0.7182818284590451, 0.0], rel=1e-6)
        assert slope.tolist() == pytest.approx([0.6321205588285577, -1.718281828459045, 0.0], rel=1e-6)
        value, slope = kl_estimate(torch.tensor([-200.0, 200.0]), "k3")
        assert (value >= 0).all()
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope).all()
        assert float(slope[0]) < -1e8  # it still pulls back

    def test_k3_is_never_negative(self) -> None:
        x = torch.cat([torch.logspace(-9, 1, 4001), -torch.logspace(-9, 1, 4001)])
        assert (kl_estimate(x, "k3")[0] >= 0).all()

    def test_low_precision_and_integer_rewards(self) -> None:
        """Not (0, 0, 0, 2): bfloat16 statistics; integers do not crash."""
        rewards = torch.tensor([1.0, 1.0, 1.0, 1.0078125], dtype=torch.bfloat16)
        found = estimate(GRPO(epsilon=1e-6), rewards, [0] * 4)
        assert found == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-3)
        assert estimate(GRPO(), torch.tensor([0, 1, 1, 1]), [0] * 4) == pytest.approx(
            [-1.5, 0.5, 0.5, 0.5], rel=1e-5
        )


CENTRING = {"grpo": GRPO(), "dr_grpo": GRPO(scale="none"), "rloo": RLOO()}
LENIENT = {
    "grpo": GRPO(on_singleton="zero"),
    "dr_grpo": GRPO(scale="none", on_singleton="zero"),
    "rloo": RLOO(on_singleton="zero"),
}


class TestGroups:
    def test_a_constant_group_has_no_float32_residue(self) -> None:
        """Not 0.0147 each; `laws.py` has every constant and size."""
        for part in CENTRING.values():
            assert estimate(part, torch.full((8,), 0.2), [0] * 8) == [0.0] * 8

    @pytest.mark.parametrize(
        ("name", "rest"),
        [
            ("grpo", [-0.7071067811865475, 0.7071067811865475]),
            ("dr_grpo", [-0.5, 0.5]),
            ("rloo", [-1.0, 1.0]),
        ],
    )
    def test_singletons_are_an_error_or_zero_and_leave_the_rest(self, name: str, rest: list[float]) -> None:
        with pytest.raises(ValueError, match="single completion"):
            estimate(CENTRING[name], [0.7, 0.0, 1.0], [0, 1, 1])
        found = estimate(LENIENT[name], [0.7, 0.0, 1.0], [0, 1, 1])
        assert found == pytest.approx([0.0, *rest], rel=1e-5)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("grpo", [-0.7071067811865475, 0.7071067811865475, 0.0]),
            ("dr_grpo", [-1.0, 1.0, 0.0]),
            ("rloo", [-2.0, 2.0, 0.0]),
        ],
    )
    def test_groups_are_ids_not_positions_nor_texts(self, name: str, expected: list[float]) -> None:
        """Not (−1, 0, 1): uneven groups merged into one row."""
        assert estimate(LENIENT[name], [1.0, 3.0, 5.0], [0, 0, 1]) == pytest.approx(expected, rel=1e-5)

    def test_a_missing_reward_of_two(self) -> None:
        """Not None as 0, not NaN everywhere: that cell leaves its reward's statistics and adds nothing."""
        rewards, scored, names = reward_matrix(
            {"first": [1.0, 0.0, 1.0, 0.0], "second": [None, 2.0, 4.0, math.nan]}
        )
        rollouts = Rollouts(
            rewards=rewards, scored=scored, reward_names=names, group_ids=torch.zeros(4, dtype=torch.long)
        )
        part = GDPO(epsilon=1e-6, whiten_epsilon=1e-6)
        combined = part.estimate(rollouts)
        before = [0.8660254037844387, -1.5731321849709863, 1.5731321849709863, -0.8660254037844387]
        assert combined[:, 0].tolist() == pytest.approx(before, rel=1e-5)
        layout = PaddedLayout(torch.ones(4, 1, dtype=torch.bool))
        window = Objective(estimator=part).freeze([(combined, layout)])
        after = [0.5906477866493575, -1.0729096849810869, 1.0729096849810869, -0.5906477866493575]
        assert window.advantages(combined, layout).flatten().tolist() == pytest.approx(after, rel=1e-5)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("grpo", [0.7071067811865475, -0.7071067811865475, 0.0, 0.0]),
            ("dr_grpo", [0.5, -0.5, 0.0, 0.0]),
            ("rloo", [1.0, -1.0, 0.0, 0.0]),
        ],
    )
    def test_completions_nobody_could_score(self, name: str, expected: list[float]) -> None:
        """Not (1.5, −0.5, −0.5, −0.5): unscorable is not a score of 0."""
        rewards, scored, _ = reward_matrix({"only": [1.0, 0.0, None, None]})
        assert estimate(CENTRING[name], rewards, [0] * 4, scored=scored) == pytest.approx(expected, rel=1e-5)


class TestSequenceWeights:
    def test_a_sequence_mean_weighs_answers_alike(self) -> None:
        """Values of one number per sequence: −0.0581, not the token-weighted 0.5235; gradient 1/length to each token."""

        class Sequence(PolicyLoss):
            def value(self, tokens: TokenBatch, context: Any) -> Tensor:
                mean = tokens.layout.segment_sum(tokens.logprobs) / tokens.layout.token_counts()
                assert tokens.advantages is not None
                return -tokens.advantages * tokens.layout.expand(mean.exp())

        leaf, layout = micro_batch([[0.2, 77.0, 77.0], [0.1, -0.1, 0.3]], [[1, 0, 0], [1, 1, 1]])
        estimates = torch.tensor([1.0, -1.0], dtype=torch.float64)
        objective = Objective(estimator=GRPO(), policy_loss=Sequence(), reduction=SequenceMean())
        window = objective.freeze([(estimates, layout)])
        batch = TokenBatch(logprobs=leaf, advantages=window.advantages(estimates, layout), layout=layout)
        output = window.loss(batch)
        output.loss.backward()
        assert float(output.loss.detach()) == pytest.approx(-0.05811592004226107, rel=1e-12)
        expected = [[-0.6107013790800849, 0.0, 0.0], [0.18419515301260794] * 3]
        assert torch.allclose(leaf.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


class TestHonestMetrics:
    def test_clip_fractions_count_tokens_without_gradient(self) -> None:
        """Not 1/6 (inverted), not 5/6 (sign ignored); masked and zero-advantage tokens are never clipped."""
        ratio = torch.tensor([[1.5, 1.5, 1.5, 0.5, 1.0, 1.5, 9.0]], dtype=torch.float64)
        advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
        layout = PaddedLayout(torch.tensor([[True] * 6 + [False]]))
        window = Objective(estimator=GRPO()).freeze([(torch.ones(1), layout)])
        old = torch.full_like(ratio, -4.0)
        leaf = (old + ratio.log()).requires_grad_()
        output = window.loss(
            TokenBatch(logprobs=leaf, old_logprobs=old, advantages=advantages, layout=layout)
        )
        output.loss.backward()
        metrics = window.summarize([output])
        assert metrics["policy/clip_low_fraction"] == pytest.approx(1 / 6)
        assert metrics["policy/clip_high_fraction"] == pytest.approx(1 / 3)
        assert metrics["policy/clip_fraction"] == pytest.approx(0.5)
        clipped = (leaf.grad == 0) & layout.mask & (advantages != 0)
        assert int(clipped.sum()) == 3
