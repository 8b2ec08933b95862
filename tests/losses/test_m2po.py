"""M2PO: thresholds against a sort, losses against the oracle, and the same answer for every cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlobjectives import (
    GDPO,
    M2PO,
    CapabilityError,
    NonFiniteError,
    Objective,
    Rollouts,
    TokenMean,
    TrainerFacts,
)
from rlobjectives.maths.second_moment import local_level
from tests.losses.offpolicy import Data, Given, run, single
from tests.oracles import m2po as oracle

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
DRIFT = [0.5, 0.1, -0.3, -0.05, -0.6, 0.2, -0.2]  # old minus current
ADVANTAGES = [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0]


def example() -> Data:
    return Data.of(ADVANTAGES, logprobs=[[-1.0]] * 7, old_logprobs=[[-1.0 + drift] for drift in DRIFT])


def objective(**options) -> Objective:
    return Objective(estimator=Given(), policy_loss=M2PO(**options))


BARE = {"floor_low": 0.0, "floor_high": 0.0}


@pytest.mark.parametrize("scope", ["step", "micro_batch"])
@pytest.mark.parametrize(
    ("options", "loss", "tau"),
    [
        ({"budget": 0.04, "mode": "clip_released", **BARE}, -0.149895155908, 0.099999999995),
        ({"budget": 0.04, "mode": "clip_waterfill", **BARE}, -0.219001674795, 0.25),
        ({"budget": 0.01, "mode": "clip_waterfill", **BARE}, -0.155161084445, 0.111803398875),
        ({"budget": 0.04, "mode": "clip_released"}, -0.270517211548, None),
        ({"budget": 0.04, "mode": "clip_waterfill"}, -0.270517211548, None),
    ],
)
def test_published_numbers(scope, options, loss, tau):
    result = single(objective(scope=scope, **options), example())
    assert float(result.loss) == pytest.approx(loss, abs=1e-12)
    assert result.metrics["m2po/second_moment_before"] == pytest.approx(0.1425, abs=1e-15)
    if tau is not None:
        assert result.metrics["m2po/clip_high"] == pytest.approx(math.expm1(tau), abs=1e-11)
        assert result.metrics["m2po/clip_low"] == pytest.approx(-math.expm1(-tau), abs=1e-11)
    else:
        assert result.metrics["m2po/clip_low"] == 0.3
        assert result.metrics["m2po/clip_high"] == 0.5


def test_published_second_moment_after_the_released_bound():
    result = single(objective(budget=0.04), example())
    assert result.metrics["m2po/second_moment_after"] == pytest.approx(0.0085, abs=1e-11)
    result = single(objective(budget=0.04, mode="clip_waterfill"), example())
    assert result.metrics["m2po/second_moment_after"] == pytest.approx(0.04, abs=1e-14)


@pytest.mark.parametrize("scope", ["step", "micro_batch"])
def test_published_mask_drops_two_tokens(scope):
    result = single(objective(budget=0.04, mode="mask", scope=scope), example())
    assert result.metrics["m2po/masked_fraction"] == pytest.approx(2 / 7)
    assert result.metrics["m2po/second_moment_before"] == pytest.approx(0.113214285714, abs=1e-12)
    squares = [d * d for d in DRIFT]
    assert oracle.kept(squares, 0.04) == [False, True, True, True, False, True, True]
    expected = math.fsum(
        -a * math.exp(-d) for a, d, k in zip(ADVANTAGES, DRIFT, oracle.kept(squares, 0.04), strict=True) if k
    )
    assert float(result.loss) == pytest.approx(expected / 7, abs=1e-13)
    kept_only = single(objective(budget=0.04, mode="mask", scope=scope, denominator="kept"), example())
    assert float(kept_only.loss) == pytest.approx(expected / 5, abs=1e-13)


@st.composite
def windows(draw):
    size = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 10_000))
    spread = draw(st.sampled_from([1e-8, 1e-3, 0.1, 1.0, 8.0]))
    ties = draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    d = (spread * torch.randn(size, generator=generator)).to(torch.float32)
    if ties:
        d = (d / spread).round() * spread
    advantages = torch.randn(size, generator=generator).sign() * (torch.rand(size, generator=generator) > 0.1)
    budget = draw(st.sampled_from([1e-10, 0.01, 0.04, 1.0])) * draw(st.sampled_from([1.0, spread**2 or 1.0]))
    return d, advantages, max(budget, 1e-300)


@given(windows())
def test_thresholds_equal_a_sort(window):
    d, advantages, budget = window
    harmful = oracle.harmful(d.tolist(), advantages.tolist())
    values = [float(d[i].double() ** 2) for i in harmful]
    mask = torch.zeros(len(d), dtype=torch.bool)
    mask[harmful] = True
    level = local_level(d, mask, budget=budget, drop=False)
    water, released = oracle.water_level(values, budget), oracle.released_level(values, budget)
    assert bool(level.binding) == (water is not None)
    if water is not None and released is not None:
        assert float(level.water_level(budget)) == pytest.approx(water, rel=1e-9, abs=1e-300)
        assert float(level.released_level()) == pytest.approx(released, rel=1e-12, abs=1e-300)
        assert float(level.mean_below(level.water_level(budget))) == pytest.approx(
            oracle.mean_bounded(values, water), rel=1e-9
        )
    everything = [float(x.double() ** 2) for x in d]
    dropped = local_level(d, torch.ones_like(mask), budget=budget, drop=True)
    found = [value <= float(dropped.cutoff()) for value in everything]
    assert found == oracle.kept(everything, budget)


@pytest.mark.parametrize("mode", ["clip_released", "clip_waterfill"])
@pytest.mark.parametrize("budget", [0.001, 0.05, 0.3, 5.0])
@pytest.mark.parametrize("floors", [(0.0, 0.0), (0.2, 0.28)])
def test_values_and_slopes_equal_the_oracle(mode, budget, floors):
    data = Data.random([4, 1, 3, 6], spread=0.5)
    result = single(objective(mode=mode, budget=budget, floor_low=floors[0], floor_high=floors[1]), data)
    log = (data.columns["logprobs"] - data.columns["old_logprobs"]).flatten().tolist()
    advantages = data.advantages[:, None].expand(data.mask.shape).flatten().tolist()
    counted = [i for i, m in enumerate(data.mask.flatten().tolist()) if m]
    harmful = oracle.harmful([log[i] for i in counted], [advantages[i] for i in counted])
    values = [log[counted[i]] ** 2 for i in harmful]
    level = (oracle.water_level if mode == "clip_waterfill" else oracle.released_level)(values, budget)
    found = {i: oracle.clipped(log[i], advantages[i], level, *floors) for i in counted}
    assert float(result.loss) == pytest.approx(math.fsum(v for v, _ in found.values()) / 14, rel=1e-7)
    for i, gradient in enumerate(result.gradient.tolist()):
        assert gradient == pytest.approx(found[i][1] / 14 if i in found else 0.0, rel=1e-7, abs=1e-12)


CUTS = [
    [[0, 1, 2, 3, 4, 5, 6]],
    [[0, 1], [2, 3, 4], [5, 6]],
    [[6], [5], [4], [3], [2], [1], [0]],
    [[3, 1], [0, 2, 6, 5, 4]],
]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "clip_released", **BARE},
        {"mode": "clip_waterfill", **BARE},
        {"mode": "clip_waterfill"},
        {"mode": "mask"},
        {"mode": "mask", "denominator": "kept"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_scope_is_the_same_for_every_cut(options, dtype):
    data = Data.random([4, 1, 3, 6, 2, 5, 1], dtype=dtype)
    whole = single(objective(budget=0.1, **options), data)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    for cut in CUTS[1:]:
        pieces = run(objective(budget=0.1, **options), [data.rows(rows) for rows in cut])
        order = [row for rows in cut for row in rows]
        gradient = whole.gradient.view(data.mask.shape)[order].flatten()
        torch.testing.assert_close(pieces.loss.double(), whole.loss.double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(pieces.gradient, gradient, rtol=tolerance, atol=tolerance)
        assert pieces.metrics == pytest.approx(whole.metrics, rel=tolerance, abs=tolerance)


def test_micro_batch_scope_depends_on_the_cut():
    data = Data.random([4, 1, 3, 6], spread=0.5)
    local = objective(budget=0.6, scope="micro_batch", mode="clip_waterfill", **BARE)
    pieces = run(local, [data.rows([0, 2]), data.rows([1, 3])])
    assert abs(float(pieces.loss - single(local, data).loss)) > 1e-4


def test_fresh_data_are_not_clipped():
    data = Data.random([3, 5])
    data.columns["old_logprobs"] = data.columns["logprobs"].clone()
    result = single(objective(**BARE), data)
    expected = torch.where(data.mask, -data.advantages[:, None], 0.0) / 8
    torch.testing.assert_close(result.gradient, expected.flatten(), **CLOSE)
    assert result.metrics["policy/clip_fraction"] == 0.0
    assert result.metrics["m2po/clip_low"] == pytest.approx(1.0)


def test_a_budget_below_every_value_closes_the_released_bound():
    data = Data.of([1.0, 1.0], logprobs=[[-1.0], [-1.0]], old_logprobs=[[-2.0], [-3.0]])
    result = single(objective(budget=1e-4, **BARE), data)
    assert result.metrics["m2po/clip_high"] == 0.0
    assert result.metrics["m2po/second_moment_after"] == 0.0
    assert torch.equal(result.gradient, torch.zeros_like(result.gradient))


@pytest.mark.parametrize("scope", ["step", "micro_batch"])
@pytest.mark.parametrize("mode", ["clip_released", "clip_waterfill", "mask"])
def test_packed_equals_padded_and_masked_garbage_changes_nothing(scope, mode):
    part = objective(scope=scope, mode=mode, budget=0.05, **BARE)
    data = Data.random([4, 1, 3])
    clean = single(part, data)
    for garbage in (float("nan"), float("inf"), float("-inf"), 1e30):
        columns = {name: torch.where(data.mask, c, garbage) for name, c in data.columns.items()}
        found = single(part, Data(data.mask, data.advantages, columns))
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.gradient, clean.gradient)
        assert found.metrics == clean.metrics
    packed = single(part, data, packed=True)
    torch.testing.assert_close(packed.gradient, clean.gradient, **CLOSE)
    assert packed.metrics == pytest.approx(clean.metrics, rel=1e-12)


@pytest.mark.parametrize("mode", ["clip_released", "clip_waterfill", "mask"])
@pytest.mark.parametrize("drift", [-100.0, -30.0, 30.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(mode, drift, advantage, dtype):
    data = Data.of(
        [advantage, advantage],
        logprobs=[[-101.0, -1.0, None], [-1.0, -1.0, -1.0]],
        old_logprobs=[[-101.0 - drift, -1.2, None], [-1.0, -2.0, -0.5]],
    )
    data.columns = {name: column.to(dtype) for name, column in data.columns.items()}
    result = single(objective(mode=mode, **BARE), data)
    assert math.isfinite(float(result.loss))
    assert torch.isfinite(result.gradient).all()
    assert all(math.isfinite(number) for number in result.metrics.values())


def test_non_finite_is_an_error_and_an_empty_window_is_empty():
    data = Data.random([2, 3])
    data.columns["old_logprobs"][0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="old_logprobs"):
        single(objective(), data)
    data = Data.random([2, 3])
    data.mask = torch.zeros_like(data.mask)
    result = single(objective(), data)
    assert float(result.loss) == 0.0
    assert torch.equal(result.gradient, torch.zeros_like(result.gradient))


def test_it_waits_for_advantages_that_are_final_later():
    torch.manual_seed(0)
    data = Data.random([3, 2, 4, 1])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    late = Objective(
        estimator=GDPO(weights=(1.0, 0.5)), policy_loss=M2PO(budget=0.05, **BARE), reduction=TokenMean()
    )
    estimate = late.estimator.estimate(Rollouts(rewards=rewards, group_ids=torch.zeros(4, dtype=torch.long)))

    def with_estimate(rows):
        piece = data.rows(rows)
        piece.advantages = estimate[rows]
        return piece

    whole = run(late, [with_estimate([0, 1, 2, 3])])
    pieces = run(late, [with_estimate([0, 1]), with_estimate([2, 3])])
    torch.testing.assert_close(pieces.gradient, whole.gradient, **CLOSE)


def test_refusals():
    part = Objective.named("m2po")
    part.check(TrainerFacts(context_parallel_size=2, dropout=0.0))
    with pytest.raises(CapabilityError, match="dropout"):
        part.check(TrainerFacts(dropout=0.2))
    with pytest.raises(CapabilityError, match="context parallelism"):
        Objective.named("m2po", policy_loss={"scope": "micro_batch"}).check(
            TrainerFacts(context_parallel_size=2)
        )
    for options in (
        {"budget": 0.0},
        {"mode": "clip"},
        {"scope": "batch"},
        {"floor_low": 1.5},
        {"denominator": "x"},
    ):
        with pytest.raises(CapabilityError, match=next(iter(options))):
            M2PO(**options)


def test_no_number_leaves_the_device(monkeypatch):
    data = Data.random([3, 2])
    layout = data.layout()
    part = objective(scope="micro_batch")
    builder = part.window()
    builder.add(estimate=data.advantages, layout=layout)
    window = builder.freeze()
    advantages = window.advantages(data.advantages, layout)
    tokens = data.tokens(layout, data.columns["logprobs"].clone().requires_grad_(), advantages=advantages)

    def refuse(self, *_):
        raise AssertionError("a tensor was read by the host")

    for name in ("__float__", "__bool__", "__int__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    output = window.loss(tokens)
    monkeypatch.undo()
    assert output.loss.requires_grad
