"""The promises of this library as laws, each run on every part and every named objective.

Nothing here knows an algorithm: parts are found by introspection (`parts.py`), windows are drawn by
hypothesis (`strategies.py`) and cut over simulated ranks (`windows.py`). The same cuts on real processes
are in `distributed/test_ranks.py`.
"""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlobjectives import (
    GRPO,
    NonFiniteError,
    Objective,
    Window,
    WindowError,
)
from tests.compare import assert_equal, assert_same
from tests.forbidden import no_host_sync, surviving_token_tensors
from tests.parts import ESTIMATORS, OBJECTIVES, PLAIN, REDUCTIONS, TERMS, exact_under_cuts, label, suited
from tests.strategies import Cut, Dice, cases, cuts, draw_case, some_case, some_cut
from tests.windows import (
    GARBAGE,
    Case,
    CountingCommunicator,
    LonelyRankError,
    MicroBatch,
    Outcome,
    Shard,
    dummy,
    run_ranks_as_threads,
    simulate,
    together,
    token_batch,
    whole,
)

EFFORT = int(os.environ.get("LAW_EFFORT", "1"))


def examples(count: int) -> settings:
    """A few examples of every part; `LAW_EFFORT=20` looks twenty times harder."""
    phases = (Phase.explicit, Phase.generate, *([Phase.shrink] if EFFORT > 1 else []))
    return settings(
        max_examples=count * EFFORT, phases=phases, suppress_health_check=list(HealthCheck), deadline=None
    )


def dice_of(name: str, salt: int) -> Dice:
    """The same draws for the same objective in every run, others for every objective."""
    return Dice(zlib.crc32(f"{name} {salt}".encode()))


def each(values: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("part", values, ids=label)


# Draws hold windows of one sequence, too, which the estimators that compare sequences report.
pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than two that count")
every_objective = pytest.mark.parametrize("name", list(OBJECTIVES))
each_effort = pytest.mark.parametrize("effort", range(EFFORT))
every_plain_objective = pytest.mark.parametrize("name", PLAIN)
every_cut = pytest.mark.parametrize(
    "name", [name for name in OBJECTIVES if exact_under_cuts(OBJECTIVES[name])]
)
every_estimator, every_term, every_reduction = each(ESTIMATORS), each(TERMS), each(REDUCTIONS)
GROUP_ESTIMATORS = [part for part in ESTIMATORS if part.required().min_group_size > 1]
"""Those that compare the answers to one prompt: what they say about a group without contrast is law."""
NOT_SHIFT_INVARIANT = frozenset({"MaxRL", "OptimalTokenBaseline"})
"""Group estimators that divide by the level of the rewards, or weigh it against a constant."""
STRAIGHT_THROUGH = (
    "CISPO(",
    "DPPO(",
    "P3O(",
    "VESPO(",
    "Reinforce(weight=",
    "KLPenalty(estimator='k1+'",
    "KLPenalty(estimator='k3+'",
)
"""Losses whose slope is on purpose not the derivative of their value; their own tests have the naive form."""


def _has_zero_law(part: Any) -> bool:
    # Exempt: a teacher's signal, and a position that one answer alone reaches (it has no baseline).
    return type(part).__name__ not in ("Combined", "OptimalTokenBaseline")


def _reads_data(objective: Objective) -> bool:
    # Estimators that look for data they must refuse, once a rollout: negative rewards, contradictory sessions.
    part = objective.estimator
    return type(part).__name__ == "MaxRL" or getattr(part, "reward_scope", "segment") != "segment"


def reference_window(objective: Objective, case: Case, shard: Shard = Shard()) -> tuple[Window, Any, Any]:
    """A frozen window of one micro-batch, its estimate and its tokens with advantages."""
    rows = torch.arange(case.count)
    estimate = objective.estimator.estimate(case.rollouts(shard=replace(shard, garbage=None)))
    tokens = token_batch(case, rows, shard)
    builder = objective.window()
    builder.add(estimate=estimate, layout=tokens.layout)
    if objective.capabilities.needs_prepass:
        builder.add_prepass(tokens)
    window = builder.freeze()
    return window, estimate, tokens.replace(advantages=window.advantages(estimate, tokens.layout))


# Partition and layout -------------------------------------------------------------------------------


def _cut(objective: Objective, case: Case, cut: Cut, tolerance: float) -> None:
    expected = whole(objective, case)
    outcomes = simulate(objective, case, cut.ranks, cut.context)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise next((error for error in errors if not isinstance(error, LonelyRankError)), errors[0])
    assert_same(together(outcomes), expected, tolerance)


def _context_sizes(objective: Objective) -> tuple[int, ...]:
    return (1, 1, 2, 3) if objective.capabilities.supports_context_parallel else (1,)


@pytest.mark.parametrize("name", [name for name in PLAIN if exact_under_cuts(OBJECTIVES[name])])
@examples(3)
@given(data=st.data())
def test_partition(name: str, data: st.DataObject) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, data.draw(cases()))
    _cut(objective, case, data.draw(cuts(case, _context_sizes(objective))), 1e-12)


@every_cut
@each_effort
def test_partition_with_every_option(name: str, effort: int) -> None:
    objective, dice = OBJECTIVES[name], dice_of(name, effort)
    case = suited(objective, some_case(dice))
    _cut(objective, case, some_cut(dice, case, _context_sizes(objective)), 1e-12)


@every_cut
@each_effort
def test_partition_in_float32(name: str, effort: int) -> None:
    objective, dice = OBJECTIVES[name], dice_of(name, 1000 + effort)
    case = suited(objective, some_case(dice, torch.float32))
    _cut(objective, case, some_cut(dice, case, (1,)), 1e-6)


@every_objective
@each_effort
def test_layout_changes_nothing(name: str, effort: int) -> None:
    objective, dice = OBJECTIVES[name], dice_of(name, 2000 + effort)
    case = suited(objective, some_case(dice))
    expected = whole(objective, case)
    assert_same(whole(objective, case, Shard(packed=True)), expected, 1e-12)
    assert_same(whole(objective, case, Shard(extra=dice.number(1, 4))), expected, 1e-12)


@every_objective
@pytest.mark.parametrize("packed", [False, True])
@each_effort
def test_blocks_change_nothing(name: str, packed: bool, effort: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch is worked on in blocks; here of one or two sequences, and with selection on bits."""
    objective, dice = OBJECTIVES[name], dice_of(name, 2500 + effort)
    case = suited(objective, some_case(dice))
    shard = Shard(packed=packed, extra=dice.number(0, 2))
    expected = whole(objective, case, shard)
    for module in ("padded", "packed"):
        monkeypatch.setattr(f"rlobjectives.layouts.{module}.piece_limit", lambda device: 7)
    monkeypatch.setattr("rlobjectives.masking._WORTHWHILE", 0)
    assert_same(whole(objective, case, shard), expected, 1e-12)
    assert_same(whole(objective, case, replace(shard, garbage=dice.one_of(GARBAGE))), expected, 1e-12)


# Masking --------------------------------------------------------------------------------------------


@every_objective
@pytest.mark.parametrize("packed", [False, True])
@each_effort
def test_masked_values_change_nothing(name: str, packed: bool, effort: int) -> None:
    objective, dice = OBJECTIVES[name], dice_of(name, 3000 + effort)
    case = suited(objective, some_case(dice, torch.float32))
    shard = Shard(packed=packed, extra=2)
    clean = whole(objective, case, shard)
    assert_equal(whole(objective, case, replace(shard, garbage=dice.one_of(GARBAGE))), clean)


@each(
    [part for part in ESTIMATORS if getattr(part, "observations", "skip") != "step"]
)  # that reads observations
@pytest.mark.parametrize("garbage", GARBAGE)
def test_unscored_cells_and_masked_columns_do_not_reach_the_estimate(part: Any, garbage: float) -> None:
    case = draw_case(3, (3, 4), unscored=0.4)
    case = suited(Objective(estimator=part), case)
    dirty = replace(case, rewards=torch.where(case.scored, case.rewards, garbage))
    clean = part.estimate(case.rollouts())
    assert torch.equal(part.estimate(dirty.rollouts(shard=Shard(garbage=garbage))), clean)


# No silent repair -----------------------------------------------------------------------------------


@every_plain_objective
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_counted_non_finite_column_is_an_error_on_every_rank(name: str, bad: float) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(5, (3, 3), holes=0.0, empty_rows=0.0, width=4))
    row = int(case.mask.any(1).nonzero()[0])
    others = [other for other in range(case.count) if other != row]
    plan = [[MicroBatch(tuple(others[:3]))], [MicroBatch(tuple(others[3:])), MicroBatch((row,))]]
    estimate = objective.estimator.estimate(case.rollouts())
    for column in objective.columns():
        broken = case.columns[column].clone()
        place = int(case.mask[row].nonzero()[0])
        broken[row, place] = bad
        outcomes = simulate(objective, case.replaced(**{column: broken}), plan, estimate=estimate)
        for outcome in outcomes:
            assert isinstance(outcome, NonFiniteError), (column, outcome)
            told = (
                f"rank 1, micro-batch 1: {column} has 1 non-finite values among {int(case.mask[row].sum())}"
            )
            assert told in str(outcome)
            assert "Raised on all 2 ranks" in str(outcome)


@every_plain_objective
def test_a_non_finite_estimate_is_an_error_on_every_rank(name: str) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(6, (3, 3), holes=0.0, empty_rows=0.0))
    row = int(case.mask.any(1).nonzero()[0])
    others = tuple(other for other in range(case.count) if other != row)
    for bad in (float("nan"), float("inf"), 1e300):  # 1e300 is infinite in the precision it is used in
        estimate = objective.estimator.estimate(case.rollouts()).clone()
        estimate[row] = bad
        outcomes = simulate(
            objective, case, [[MicroBatch(others), MicroBatch((row,))], []], estimate=estimate
        )
        for outcome in outcomes:
            assert isinstance(outcome, NonFiniteError), outcome
            assert "rank 0, micro-batch 1: estimate has" in str(outcome)


@every_plain_objective
def test_a_broken_estimator_stops_every_rank(name: str) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(7, (3, 3)))

    def one(communicator: Any) -> None:
        builder = objective.window(communicator)
        with builder.guard():
            rewards = case.rewards.clone()
            if communicator.rank == 1:
                rewards[2] = float("nan")
            rollouts = replace(case, rewards=rewards, scored=torch.ones_like(case.scored)).rollouts()
            builder.add(estimate=objective.estimator.estimate(rollouts), layout=rollouts.tokens("test"))
            if objective.capabilities.needs_prepass:
                builder.add_prepass(token_batch(case, torch.arange(case.count)))
        builder.freeze()

    kinds = [type(error).__name__ for error in run_ranks_as_threads(one, 3)]
    assert kinds == ["RankError", "NonFiniteError", "RankError"]


# Exact zero -----------------------------------------------------------------------------------------


@each([part for part in GROUP_ESTIMATORS if _has_zero_law(part)])
@pytest.mark.parametrize("constant", [0.1, 0.2, 0.3, 0.35, 0.7, 0.95, -1e4, 1e-8])
def test_a_constant_group_is_exactly_zero(part: Any, constant: float) -> None:
    for size in (2, 3, 7, 8, 16):
        case = draw_case(size, (size, 4), holes=0.0, empty_rows=0.0)
        flat = case.group_ids == 7
        mask = case.mask.clone()
        mask[:, 0] = True  # an answer without tokens has nothing to show
        case = replace(case, mask=mask, lengths=case.lengths.clamp_min(1))
        best = torch.zeros(case.count, 1, dtype=torch.float64)
        best[(~flat).nonzero()[0]] = 1.0  # one answer to the other prompt stands out
        case = replace(case, rewards=torch.where(flat.unsqueeze(1), constant, best.expand_as(case.rewards)))
        case = case.replaced(token_rewards=torch.zeros_like(case.columns["token_rewards"]))
        case = suited(Objective(estimator=part), case)
        outcome = whole(Objective(estimator=part), case)
        assert torch.count_nonzero(outcome.advantages[flat]) == 0
        assert torch.count_nonzero(outcome.advantages[~flat]) > 0
        if not part.token_level:
            signal = part.carries_signal(case.rollouts())
            assert signal.tolist() == [True, False]  # groups in the order of their ids: 2, then 7


@every_objective
@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_window_is_an_attached_zero(name: str, packed: bool) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(8, (2, 3), empty_rows=1.0))
    assert not case.mask.any()
    leaf = case.columns["logprobs"].clone().requires_grad_()
    window, _, tokens = reference_window(objective, case.replaced(logprobs=leaf), Shard(packed=packed))
    output = window.loss(tokens)
    assert window.empty is True
    assert output.loss.requires_grad and float(output.loss.detach()) == 0.0
    output.loss.backward()
    assert leaf.grad is not None and torch.count_nonzero(leaf.grad) == 0
    assert all(math.isfinite(value) for value in window.summarize([output]).values())

    outcomes = simulate(objective, case, [[MicroBatch((0, 1))], [], [MicroBatch((2,)), MicroBatch((3, 4))]])
    assert all(isinstance(one, Outcome) and float(one.loss) == 0.0 for one in outcomes)


@every_plain_objective
def test_a_dummy_is_an_attached_zero(name: str) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(9, (3, 3)))
    window, _, _ = reference_window(objective, case)
    tokens = dummy(case)
    output = window.loss(tokens)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert tokens.logprobs.grad is not None and torch.count_nonzero(tokens.logprobs.grad) == 0


# Precision ------------------------------------------------------------------------------------------


@each([part for part in GROUP_ESTIMATORS if type(part).__name__ not in NOT_SHIFT_INVARIANT])
def test_statistics_survive_an_offset(part: Any) -> None:
    case = draw_case(10, (4, 5), holes=0.0, empty_rows=0.0)
    small = replace(case, rewards=1e-3 * case.rewards.abs())
    lifted = replace(small, rewards=1e4 + small.rewards)
    near, far = (whole(Objective(estimator=part), one).advantages for one in (small, lifted))
    assert torch.allclose(near, far, rtol=0, atol=1e-7 * float(near.abs().max()))


# One collective -------------------------------------------------------------------------------------


@every_objective
def test_opening_a_window_costs_one_collective(name: str) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(11, (3, 4)))
    communicator = CountingCommunicator()
    estimate = objective.estimator.estimate(case.rollouts())
    builder = objective.window(communicator)
    for rows in (torch.arange(4), torch.arange(4, 7)):
        part = estimate[rows]
        tokens = token_batch(case, rows)
        builder.add(estimate=part, layout=tokens.layout)
        if objective.capabilities.needs_prepass:
            builder.add_prepass(tokens)
    assert communicator.collectives == 0
    builder.freeze()
    # One more where a statistic needs another's result: final advantages, earlier rounds, which tokens stay.
    more = [
        term.prepass_rounds - 1 + term.prepass_reads_advantages + term.shrinks_denominator
        for term in objective.token_parts().values()
        if term.required().needs_prepass
    ]
    assert 1 <= communicator.collectives <= 1 + max([0, *more])


@every_plain_objective
def test_reporting_costs_one_collective(name: str) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(12, (3, 4)))
    communicator = CountingCommunicator()
    builder = objective.window(communicator)
    tokens = token_batch(case, torch.arange(case.count))
    estimate = objective.estimator.estimate(case.rollouts())
    builder.add(estimate=estimate, layout=tokens.layout)
    if objective.capabilities.needs_prepass:
        builder.add_prepass(tokens)
    window = builder.freeze()
    before = communicator.collectives
    advantages = window.advantages(estimate, tokens.layout)
    output = window.loss(tokens.replace(advantages=advantages))
    assert communicator.collectives == before
    window.summarize([output])
    assert communicator.collectives == before + 1


# Gradient -------------------------------------------------------------------------------------------


@each([part for part in TERMS if not label(part).startswith(STRAIGHT_THROUGH)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_slope_is_the_derivative(part: Any, packed: bool) -> None:
    case = draw_case(13, (4, 4), width=5, spread=0.5)
    objective = next(one for one in OBJECTIVES.values() if part in one.parts().values())
    scope = next(name for name, one in objective.token_terms().items() if one == part)
    window, _, tokens = reference_window(objective, case, Shard(packed=packed))
    slope = part.value_and_slope(tokens, window.context(scope)).slope

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        found = part.value_and_slope(tokens.replace(logprobs=logprobs), window.context(scope))
        return tokens.layout.select(found.value).sum()

    step = 1e-6
    for place in tokens.layout.mask.nonzero().tolist():
        delta = torch.zeros_like(tokens.logprobs)
        delta[tuple(place)] = step
        numeric = (total(tokens.logprobs + delta) - total(tokens.logprobs - delta)) / (2 * step)
        assert float(slope[tuple(place)]) == pytest.approx(float(numeric), rel=1e-7, abs=1e-8)


@every_objective
def test_the_gradient_is_weight_times_slope_and_goes_nowhere_else(name: str) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(14, (4, 4), spread=0.5))
    window, _, tokens = reference_window(objective, case)
    columns = {
        column: value.detach().clone().requires_grad_()
        for column in (*case.columns, "advantages")
        if isinstance(value := getattr(tokens, column, None), torch.Tensor)
    }
    window.loss(type(tokens)(layout=tokens.layout, **columns)).loss.backward()
    still = tokens.detach()
    terms = [
        term.value_and_slope(still, window.context(scope)) for scope, term in objective.token_terms().items()
    ]
    if not objective.corrections() and not objective.shapings():  # those change the weights or the advantages
        slope = torch.stack([term.slope for term in terms]).sum(0)
        expected = tokens.layout.select(slope * window.weights(tokens.layout))
        assert torch.allclose(columns["logprobs"].grad, expected, rtol=1e-12, atol=0.0)
    if objective.entropy_coef:
        bonus = -objective.entropy_coef * window.weights(tokens.layout)
        assert torch.allclose(columns["entropy"].grad, bonus, rtol=1e-12, atol=0.0)
    others = {column for term in terms for column in term.slopes} | (
        {"entropy"} if objective.entropy_coef else set()
    )
    assert {column for column in columns if columns[column].grad is not None} == {"logprobs", *others}


@every_plain_objective
def test_a_second_backward_is_refused(name: str) -> None:
    case = suited(OBJECTIVES[name], draw_case(15, (3, 3)))
    leaf = case.columns["logprobs"].clone().requires_grad_()
    window, _, tokens = reference_window(OBJECTIVES[name], case.replaced(logprobs=leaf))
    output = window.loss(tokens)
    output.loss.backward(retain_graph=True)
    with pytest.raises(WindowError, match="backward ran twice"):
        output.loss.backward()


@pytest.mark.parametrize("name", [*map(label, TERMS), "everything"])
def test_only_one_token_tensor_survives_the_loss(name: str) -> None:
    objective = OBJECTIVES[name]
    case = draw_case(16, (8, 8), width=64, dtype=torch.float32, holes=0.0, empty_rows=0.0)
    leaf = case.columns["logprobs"].clone().requires_grad_()
    entropy = case.columns["entropy"].clone().requires_grad_()
    window, _, tokens = reference_window(objective, case.replaced(logprobs=leaf, entropy=entropy))
    output, survivors = surviving_token_tensors(
        lambda: window.loss(tokens), tokens.layout.mask.numel(), keep=lambda found: found.loss
    )
    # The entropy bonus is ordinary autograd and keeps the weights it is multiplied with.
    assert survivors == [tokens.logprobs.dtype] * (2 if objective.entropy_coef else 1)
    assert output.requires_grad


# No host sync ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not _reads_data(OBJECTIVES[name])])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_the_device(name: str, packed: bool) -> None:
    objective = OBJECTIVES[name]
    case = suited(objective, draw_case(17, (3, 4), unscored=0.2))
    rollouts = case.rollouts(shard=Shard(packed=packed))
    window, _, tokens = reference_window(objective, case, Shard(packed=packed))
    tokens = tokens.replace(logprobs=tokens.logprobs.clone().requires_grad_())
    with no_host_sync():
        estimate = objective.estimator.estimate(rollouts)
        objective.estimator.statistics(estimate, tokens.layout)
        objective.reduction.statistics(tokens.layout)
        advantages = window.advantages(estimate, tokens.layout)
        window.weights(tokens.layout)
        window.loss(tokens.replace(advantages=advantages)).loss.backward()


# Symmetries -----------------------------------------------------------------------------------------


@every_estimator
@examples(3)
@given(case=cases(), seed=st.integers(0, 999))
def test_order_and_names_of_groups_do_not_matter(part: Any, case: Case, seed: int) -> None:
    case = suited(Objective(estimator=part), case)
    estimate = part.estimate(case.rollouts())
    order = torch.randperm(case.count, generator=torch.Generator().manual_seed(seed))
    moved = part.estimate(case.permuted(order).rollouts())
    size = float(estimate.abs().max()) if estimate.numel() else 0.0
    assert torch.allclose(moved, estimate[order], rtol=0.0, atol=1e-12 * size)
    named = replace(case, group_ids=-3 * case.group_ids + 11)
    assert torch.equal(part.estimate(named.rollouts()), estimate)


@each([part for part in REDUCTIONS if type(part).__name__.endswith("Mean")])
@pytest.mark.parametrize("packed", [False, True])
def test_the_weights_of_a_mean_add_up_to_one(part: Any, packed: bool) -> None:
    for seed in range(5):
        case = draw_case(20 + seed, (3, 4, 2), holes=0.0, empty_rows=0.0)
        mask = case.mask.clone()
        mask[:, 0] = True  # an empty sequence would leave its share out, which is another law
        case = replace(case, mask=mask, lengths=case.lengths.clamp_min(1))
        window, _, tokens = reference_window(
            Objective(estimator=GRPO(), reduction=part), case, Shard(packed=packed)
        )
        assert float(window.weights(tokens.layout).sum()) == pytest.approx(1.0, rel=1e-14)


@every_reduction
def test_an_empty_sequence_weighs_nothing(part: Any) -> None:
    case = draw_case(30, (3, 3), empty_rows=0.5)
    window, _, tokens = reference_window(Objective(estimator=GRPO(), reduction=part), case)
    weights = window.weights(tokens.layout)
    assert torch.count_nonzero(weights[~case.mask]) == 0
    assert bool((weights[case.mask] > 0).all())
