"""TD(λ) returns and V-trace against plain recursions and published numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import (
    GAE,
    CapabilityError,
    MissingColumnError,
    Objective,
    PackedLayout,
    PaddedLayout,
    ReinforcePlusPlus,
    Rollouts,
    ShapeError,
    TDLambda,
    TrainerFacts,
    VTrace,
)
from rlobjectives.functional import vtrace_returns
from tests.estimators.helpers import LAYOUTS, close, layout_of, rollouts_of, rows_of
from tests.oracles import credit as oracle

VALUES = [0.5, 0.6, 0.4, 0.7]
both_layouts = pytest.mark.parametrize("kind", LAYOUTS)


@both_layouts
def test_td_lambda_numbers(kind):
    rollouts = rollouts_of([[1] * 4], [1.0], kind, values=[VALUES])
    found = TDLambda(discount=0.99, trace_decay=0.95, baseline="none").estimate(rollouts)
    close(rows_of(found, [[1] * 4], kind), [[0.910881324787, 0.936928575, 0.97515, 1.0]], 1e-11)


@both_layouts
@pytest.mark.parametrize("observations", ["skip", "zero_value", "step"])
def test_td_lambda_is_gae_plus_values(kind, observations):
    mask = [[1, 0, 1, 1, 0], [0, 1]]
    rollouts = rollouts_of(
        mask,
        [1.0, -2.0],
        kind,
        values=[[0.1, 7.0, 0.2, 8.0, 0.3], [0.4, 0.6]],
        token_rewards=[[0.5, 9.0, -0.5, 0.0, 9.0], [9.0, 1.0]],
        truncated=[False, True],
        bootstrap_values=torch.tensor([9.0, 3.0]),
    )
    options = {
        "discount": 0.9,
        "trace_decay": 0.7,
        "observations": observations,
        "on_observation_reward": "drop",
    }
    gae, td = GAE(**options), TDLambda(**options)
    assert torch.equal(td.estimate(rollouts), gae.estimate(rollouts))
    assert torch.equal(td.value_targets(rollouts), gae.value_targets(rollouts))
    assert torch.equal(TDLambda(**options, baseline="none").estimate(rollouts), gae.value_targets(rollouts))
    assert rollouts.layout is not None
    plus = rollouts.layout.select(gae.estimate(rollouts) + rollouts.values)
    close(td.value_targets(rollouts), plus, 1e-14)


@both_layouts
def test_vtrace_numbers(kind):
    logs = [0.2, -0.3, 0.5, -0.1]
    rollouts = rollouts_of(
        [[1] * 4],
        [1.0],
        kind,
        values=[VALUES],
        old_logprobs=[[log - 9.0 for log in logs]],
        behavior_logprobs=[[-9.0] * 4],
    )
    found = VTrace(discount=0.99).credit(rollouts)
    close(
        rows_of(found.returns, [[1] * 4], kind),
        [[0.852247863116, 0.86085642739, 0.961736713157, 0.971451225411]],
    )
    close(
        rows_of(found.advantages, [[1] * 4], kind),
        [[0.352247863116, 0.26085642739, 0.561736713157, 0.271451225411]],
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    decay=st.sampled_from([0.0, 0.8, 1.0]),
    clips=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
    kind=st.sampled_from(LAYOUTS),
)
def test_vtrace_equals_the_plain_recursion(seed, lengths, discount, decay, clips, kind):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=rng, dtype=torch.float64).tolist()
    mask = [(torch.rand(n, generator=rng) > 0.3).int().tolist() for n in lengths]
    values, extra, logs = ([draw(n) for n in lengths] for _ in range(3))
    rewards, ends = draw(len(lengths)), draw(len(lengths))
    rollouts = rollouts_of(
        mask,
        rewards,
        kind,
        values=values,
        token_rewards=extra,
        old_logprobs=[[log - 9.0 for log in row] for row in logs],
        behavior_logprobs=[[-9.0] * n for n in lengths],
        truncated=[True] * len(lengths),
        bootstrap_values=torch.tensor(ends, dtype=torch.float64),
    )
    estimator = VTrace(
        discount=discount,
        trace_decay=decay,
        rho_clip=clips[0],
        trace_clip=clips[1],
        policy_rho_clip=clips[2],
        on_lost_reward="drop",
        on_observation_reward="drop",
    )
    targets, advantages = (
        rows_of(estimator.value_targets(rollouts), mask, kind),
        rows_of(estimator.estimate(rollouts), mask, kind),
    )
    for row, counted in enumerate(mask):
        pick = lambda column: oracle.actions(column[row], counted)
        gains = pick(extra)
        if gains:
            gains[-1] += rewards[row]
        expected = oracle.vtrace(
            pick(values),
            gains,
            [math.exp(x) for x in pick(logs)],
            discount,
            decay,
            clips[0],
            clips[1],
            clips[2],
            bootstrap=ends[row],
        )
        close(targets[row], oracle.spread(expected[0], counted))
        close(advantages[row], oracle.spread(expected[1], counted))


def test_vtrace_on_policy_has_the_targets_of_gae():
    columns = {"values": [VALUES], "old_logprobs": [[-1.0] * 4], "behavior_logprobs": [[-1.0] * 4]}
    rollouts = rollouts_of([[1, 1, 0, 1]], [1.0], **columns)
    found = VTrace(discount=0.9, trace_decay=0.7).value_targets(rollouts)
    close(found, GAE(discount=0.9, trace_decay=0.7).value_targets(rollouts))


def test_vtrace_reads_nothing_under_the_mask_and_survives_any_ratio():
    layout = layout_of([[1, 0, 1]])
    clean = vtrace_returns(layout, torch.tensor([[0.1, 0.0, 0.3]]), torch.tensor([[500.0, 0.0, -500.0]]))
    dirty = vtrace_returns(
        layout, torch.tensor([[0.1, math.nan, 0.3]]), torch.tensor([[500.0, math.inf, -500.0]])
    )
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)
        assert bool(torch.isfinite(one).all())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TDLambda, {"discount": 2.0}),
        (TDLambda, {"trace_decay": -1.0}),
        (TDLambda, {"baseline": "mean"}),
        (TDLambda, {"observations": "x"}),
        (TDLambda, {"on_lost_reward": "x"}),
        (TDLambda, {"weights": (math.inf,)}),
        (VTrace, {"discount": 2.0}),
        (VTrace, {"trace_decay": 2.0}),
        (VTrace, {"rho_clip": 0.0}),
        (VTrace, {"trace_clip": -1.0}),
        (VTrace, {"policy_rho_clip": math.nan}),
        (VTrace, {"on_lost_reward": "x"}),
        (VTrace, {"weights": (math.inf,)}),
    ],
)
def test_bad_options_are_refused(kind, options):
    with pytest.raises(CapabilityError):
        kind(**options)


def test_what_they_need():
    rollouts = rollouts_of([[1]], [1.0], values=[[0.0]])
    with pytest.raises(MissingColumnError, match="old_logprobs"):
        VTrace().estimate(rollouts)
    with pytest.raises(MissingColumnError, match="values"):
        TDLambda().estimate(rollouts_of([[1]], [1.0]))
    objective = Objective.named("vtrace")
    objective.check(TrainerFacts(offers={"values": True}, behavior_logprobs="sampled", max_staleness=4))
    with pytest.raises(CapabilityError, match="log-probabilities"):
        objective.check(TrainerFacts(offers={"values": True}, behavior_logprobs="none"))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(
    "estimator",
    [
        TDLambda(discount=0.99, trace_decay=0.95),
        VTrace(discount=0.99, trace_decay=0.95),
        ReinforcePlusPlus(discount=0.95),
    ],
    ids=repr,
)
def test_the_last_token_of_32k_is_rewarded_and_the_first_stays_finite(kind, estimator):
    length = 32_768
    flat = {name: torch.zeros(length) for name in ("values", "old_logprobs", "behavior_logprobs")}
    layout = PackedLayout(torch.tensor([0, length]), torch.ones(length, dtype=torch.bool))
    if kind == "padded":
        flat = {name: column.unsqueeze(0) for name, column in flat.items()}
        layout = PaddedLayout(layout.mask.unsqueeze(0))
    rollouts = Rollouts(rewards=torch.ones(1), group_ids=torch.zeros(1).long(), layout=layout, **flat)
    found = estimator.estimate(rollouts).flatten()
    assert bool(torch.isfinite(found).all())
    assert float(found[-1]) == 1.0
    decay = 0.95 if isinstance(estimator, ReinforcePlusPlus) else 0.99 * 0.95
    # V-trace: a one-step advantage on top of the λ-target of the next token.
    expected = 0.99 * decay**99 if isinstance(estimator, VTrace) else decay**100
    assert float(found[-101]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"discount": 2.0},
        {"discount": -0.1},
        {"trace_decay": 3.0},
        {"rho_clip": 0.0},
        {"trace_clip": -1.0},
        {"policy_rho_clip": 0.0},
        {"log_ratio_clamp": 0.0},
    ],
    ids=str,
)
def test_v_trace_refuses_options_out_of_range(options):
    layout, zeros = layout_of([[1, 1]]), torch.zeros(1, 2)
    with pytest.raises(CapabilityError, match=next(iter(options))):
        vtrace_returns(layout, zeros, zeros, **options)


def test_v_trace_checks_shapes_and_gives_no_gradient():
    layout, ones = layout_of([[1, 1], [1, 0]]), torch.ones(2, 2, requires_grad=True)
    for wrong in (torch.ones(1), torch.ones(3)):
        with pytest.raises(ShapeError, match="final_rewards has shape"):
            vtrace_returns(layout, ones, ones, final_rewards=wrong)
    with pytest.raises(ShapeError, match="layout is Tensor"):
        vtrace_returns(layout.mask, ones, ones)
    last = torch.ones(2, requires_grad=True)
    credit = vtrace_returns(layout, ones, ones, token_rewards=ones, final_rewards=last)
    assert not credit.advantages.requires_grad
    assert not credit.returns.requires_grad
