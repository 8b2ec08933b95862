"""KL-Cov: which tokens are chosen, what they cost, and the same answer for every cut of the window."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import GDPO, CapabilityError, KLCov, Objective, Rollouts
from tests.losses.offpolicy import Data, Given, run, single
from tests.oracles import kl_cov as oracle

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
LENGTHS = [4, 1, 6, 3, 0, 5]
TOKENS = sum(LENGTHS)
DIVERGENCES = ["abs", "k2", "k3"]


def objective(**options) -> Objective:
    return Objective(estimator=Given(), policy_loss=KLCov(**options))


def flat(data: Data) -> tuple[list[float], list[float], list[float]]:
    """Counted tokens: current and old log-probabilities, advantages."""
    advantages = data.advantages[:, None].expand(data.mask.shape)
    logprobs, old = data.columns["logprobs"], data.columns["old_logprobs"]
    return logprobs[data.mask].tolist(), old[data.mask].tolist(), advantages[data.mask].tolist()


def naive(data: Data, fraction: float, coef: float, divergence: str) -> tuple[float, torch.Tensor | None]:
    """The formula in plain PyTorch, with autograd."""
    leaf = data.columns["logprobs"].clone().requires_grad_()
    log = (leaf - data.columns["old_logprobs"])[data.mask]
    logprobs, advantages = (
        leaf[data.mask].detach(),
        data.advantages[:, None].expand(data.mask.shape)[data.mask],
    )
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    top = covariance.topk(max(1, int(len(covariance) * fraction))).indices
    penalty = {"abs": log.abs(), "k2": log.square() / 2, "k3": log.exp() - 1 - log}[divergence]
    loss = -advantages * log.exp()
    loss = loss + torch.zeros_like(loss).index_add(0, top, coef * penalty[top])
    loss.mean().backward()
    return float(loss.mean().detach()), leaf.grad


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.35])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_value_and_slope_are_those_of_the_formula(divergence, fraction, packed):
    data = Data.random(LENGTHS, seed=3)
    found = single(objective(fraction=fraction, coef=0.7, divergence=divergence), data, packed=packed)
    loss, gradient = naive(data, fraction, 0.7, divergence)
    assert float(found.loss) == pytest.approx(loss, rel=1e-11)
    torch.testing.assert_close(found.gradient.view(data.mask.shape), gradient, **CLOSE)
    values, slopes = oracle.kl_cov(*flat(data), fraction, 0.7, divergence)
    assert float(found.loss) == pytest.approx(math.fsum(values) / TOKENS, rel=1e-11)
    assert (found.gradient.view(data.mask.shape)[data.mask] * TOKENS).tolist() == pytest.approx(
        slopes, rel=1e-10, abs=1e-12
    )
    share = sum(oracle.chosen(flat(data)[0], flat(data)[2], fraction)) / TOKENS
    assert found.metrics["kl_cov/penalized_fraction"] == pytest.approx(share)
    assert found.metrics["kl_cov/covariance"] == pytest.approx(
        math.fsum(oracle.covariances(flat(data)[0], flat(data)[2])) / TOKENS, rel=1e-10
    )


def test_numbers_worked_out_by_hand():
    """ℓ = −1, −2, −3 and A = 1, 0, −1: covariances 1, 0 and 1, so two of three are penalised together."""
    data = Data.of([1.0, 0.0, -1.0], logprobs=[[-1.0], [-2.0], [-3.0]], old_logprobs=[[-1.5], [-2.0], [-2.5]])
    found = single(objective(fraction=0.3, coef=2.0), data)
    first, last = -math.exp(0.5) + 2 * 0.5, math.exp(-0.5) + 2 * 0.5
    assert float(found.loss) == pytest.approx((first + last) / 3, rel=1e-14)
    assert (3 * found.gradient).tolist() == pytest.approx(
        [-math.exp(0.5) + 2, 0.0, math.exp(-0.5) - 2], rel=1e-14
    )
    assert found.metrics["kl_cov/threshold"] == 1.0
    assert found.metrics["kl_cov/penalized_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_any_cut_of_the_window_gives_the_same(divergence):
    data = Data.random(LENGTHS, seed=5)
    chosen = objective(fraction=0.2, divergence=divergence)
    whole = single(chosen, data)
    for cuts in ([[0, 1, 2], [3, 4, 5]], [[5], [3, 0], [], [1, 2, 4]], [[k] for k in range(6)]):
        pieces = run(chosen, [data.rows(rows) for rows in cuts])
        torch.testing.assert_close(pieces.loss, whole.loss, rtol=1e-12, atol=0)
        gradient, order = pieces.gradient.view(data.mask.shape), [row for rows in cuts for row in rows]
        torch.testing.assert_close(gradient, whole.gradient.view(data.mask.shape)[order], **CLOSE)
        assert pieces.metrics == pytest.approx(whole.metrics, rel=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=1, max_size=12), st.sampled_from([0.01, 0.25, 0.5, 1.0]))
def test_never_fewer_tokens_than_asked_for_and_only_positive_ones(numbers, fraction):
    """With A = ±1 and a mean of −128 the covariances are the log-probabilities plus 128; ties are common."""
    rows = [[x - 128.0] for x in numbers] + [[-x - 128.0] for x in numbers]
    data = Data.of([1.0] * len(numbers) + [-1.0] * len(numbers), logprobs=rows, old_logprobs=rows)
    found = single(objective(fraction=fraction), data).metrics["kl_cov/penalized_fraction"]
    values = numbers * 2
    count = max(1, math.floor(fraction * len(values) + 1e-9))
    threshold = sorted(values, reverse=True)[count - 1]
    assert found * len(values) == pytest.approx(sum(v >= threshold and v > 0 for v in values))


@pytest.mark.parametrize("level", [0.0, 2.0])
def test_a_window_without_contrast_is_left_alone(level):
    data = Data.random(LENGTHS, seed=7)
    data.advantages = torch.full_like(data.advantages, level)
    found = single(objective(fraction=0.5), data)
    assert found.metrics["kl_cov/penalized_fraction"] == 0.0
    assert found.metrics["kl_cov/penalty"] == 0.0
    if level == 0.0:
        assert float(found.loss) == 0.0
        assert not found.gradient.any()


def test_fresh_samples_are_not_penalised():
    data = Data.random(LENGTHS, seed=8)
    data.columns["old_logprobs"] = data.columns["logprobs"].clone()
    plain = single(objective(fraction=0.5, coef=0.0), data)
    found = single(objective(fraction=0.5, coef=9.0), data)
    assert found.metrics["kl_cov/penalized_fraction"] > 0.3
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.gradient, plain.gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("drift", [-100.0, 100.0])
def test_far_tokens_stay_finite_and_keep_the_pull_of_the_penalty(drift, dtype):
    now = -120.0 if drift < 0 else -0.5  # the likelier one is pushed up
    data = Data.of([1.0, -1.0], logprobs=[[now], [-130.0]], old_logprobs=[[now - drift], [-130.0 + drift]])
    data.columns = {name: column.to(dtype) for name, column in data.columns.items()}
    for divergence, size in (("abs", 1.0), ("k2", 100.0), ("k3", None)):
        found = single(objective(fraction=1.0, coef=3.0, divergence=divergence), data)
        assert torch.isfinite(found.loss)
        pulls = (2 * found.gradient / 3.0).tolist()
        assert [math.copysign(1, pull) for pull in pulls] == [
            math.copysign(1, drift),
            math.copysign(1, -drift),
        ]
        if size is not None:
            assert [abs(pull) for pull in pulls] == pytest.approx([size, size])


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_changes_nothing(fill):
    data, clean = Data.random(LENGTHS, seed=9), Data.random(LENGTHS, seed=9)
    for name in data.columns:
        data.columns[name] = torch.where(data.mask, data.columns[name], fill)
        clean.columns[name] = torch.where(data.mask, clean.columns[name], 0.0)
    found, base = (single(objective(fraction=0.2), one) for one in (data, clean))
    assert torch.equal(found.loss, base.loss)
    assert torch.equal(found.gradient, base.gradient)
    assert found.metrics == base.metrics


@pytest.mark.parametrize("lengths", [[1], [1, 0]])
def test_a_single_token(lengths):
    data = Data.random(lengths, seed=2)
    found = single(objective(), data)
    assert found.metrics["kl_cov/penalized_fraction"] == 0.0  # its covariance is 0


def test_advantages_that_are_final_late_take_another_exchange():
    data = Data.random(LENGTHS, seed=5)
    rewards = torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    late = Objective(estimator=GDPO(), policy_loss=KLCov(fraction=0.2))
    data.advantages = late.estimator.estimate(
        Rollouts(rewards=rewards, group_ids=torch.zeros(6, dtype=torch.long))
    )
    whole = single(late, data)
    pieces = run(late, [data.rows([0, 4, 5]), data.rows([1, 2, 3])])
    torch.testing.assert_close(pieces.loss, whole.loss, rtol=1e-12, atol=0)
    gradient = whole.gradient.view(data.mask.shape)[[0, 4, 5, 1, 2, 3]]
    torch.testing.assert_close(pieces.gradient.view(data.mask.shape), gradient, **CLOSE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"fraction": 1.5}, "fraction is 1.5"),
        ({"coef": -1.0}, "coef is -1.0"),
        ({"divergence": "k1"}, "divergence is 'k1'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(CapabilityError, match=words):
        KLCov(**options)
