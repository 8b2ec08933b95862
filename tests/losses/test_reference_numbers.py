"""Published example numbers on one small fixture, through whole objectives: loss, gradient and tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    SAPO,
    VESPO,
    ClippedSurrogate,
    DecoupledClip,
    FixedBudget,
    GSPOToken,
    KLPenalty,
    Objective,
    PaddedLayout,
    PolicyLoss,
    Reinforce,
    SequenceMean,
    SequenceSum,
    TokenBatch,
    TokenMean,
)
from rlobjectives.functional import kl_estimate
from tests.losses.batches import context_of, run

MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGES = (1.2, -0.8)


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def fixture(**facts: Tensor) -> TokenBatch:
    """Two sequences; the masked slot holds numbers that give the wrong answer when read."""
    return TokenBatch(
        logprobs=rows([-0.8, -2.3, -0.4], [-1.0, -1.1, -9.0]),
        old_logprobs=rows([-1.0, -2.0, -0.5], [-1.5, -0.7, -3.0]),
        ref_logprobs=rows([-1.1, -1.9, -0.6], [-1.4, -0.9, 0.0]),
        behavior_logprobs=rows([-1.1, -1.8, -0.5], [-1.6, -0.9, 0.0]),
        advantages=rows([1.2] * 3, [-0.8] * 3),
        layout=PaddedLayout(MASK, **facts),
    )


def window_loss(
    part: PolicyLoss, reduction: Any, **options: Any
) -> tuple[float, list[float], dict[str, float]]:
    tokens = fixture()
    objective = Objective(estimator=GRPO(), policy_loss=part, reduction=reduction, **options)
    window = objective.freeze([(rows(list(ADVANTAGES))[0], tokens.layout)])
    leaf = tokens.logprobs.clone().requires_grad_()
    output = window.loss(tokens.replace(logprobs=leaf))
    output.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[~MASK].tolist() == [0.0]
    return float(output.loss.detach()), leaf.grad[MASK].tolist(), window.summarize([output])


REDUCTIONS = {
    "token_mean": (TokenMean(), 1),
    "seq_mean_token_mean": (SequenceMean(), 1),
    "seq_mean_token_sum": (SequenceSum(), 1),
    "dr_grpo_B8": (FixedBudget(max_tokens=8), 1),
    "token_sum": (TokenMean(), 5),
}
TOKENS: dict[str, tuple[PolicyLoss, list[float] | None, list[float] | None, dict[str, float]]] = {
    "ppo .2/.2": (
        ClippedSurrogate(),
        [-1.44, -0.888981864818, -1.326205101691, 1.31897701656, 0.64],
        [0.0, -0.888981864818, -1.326205101691, 1.31897701656, 0.0],
        {
            "token_mean": -0.33924198999,
            "seq_mean_token_mean": -0.119453573611,
            "seq_mean_token_sum": -0.848104974974,
            "dr_grpo_B8": -0.106013121872,
            "token_sum": -1.696209949949,
        },
    ),
    "ppo .2/.28": (
        ClippedSurrogate(clip_high=0.28),
        [-1.465683309792, -0.888981864818, -1.326205101691, 1.31897701656, 0.64],
        [-1.465683309792, -0.888981864818, -1.326205101691, 1.31897701656, 0.0],
        {
            "token_mean": -0.344378651948,
            "seq_mean_token_mean": -0.123734125243,
            "seq_mean_token_sum": -0.86094662987,
            "dr_grpo_B8": -0.107618328734,
            "token_sum": -1.721893259741,
        },
    ),
    "cispo two-sided": (
        CISPO(clip_low=0.2, clip_high=0.28),
        [1.172546647834, 2.208, 0.530482040676, -1.024, -0.704],
        [-1.465683309792, -0.96, -1.326205101691, 1.024, 0.64],
        {
            "token_mean": 0.436605737702,
            "seq_mean_token_mean": 0.219838114752,
            "seq_mean_token_sum": 1.091514344255,
            "dr_grpo_B8": 0.136439293032,
            "token_sum": 2.18302868851,
        },
    ),
    "cispo upper": (
        CISPO(bounds="upper", ratio_cap=5.0),
        [1.172546647834, 2.044658289082, 0.530482040676, -1.31897701656, -0.589881640511],
        None,
        {"token_mean": 0.367765664104},
    ),
    "cispo sign": (
        CISPO(bounds="sign", clip_low=0.2, clip_high=0.28),
        [1.172546647834, 2.044658289082, 0.530482040676, -1.31897701656, -0.704],
        None,
        {},
    ),
    "gspo .2": (
        GSPO(clip_low=0.2, clip_high=None),
        [-1.2, -1.2, -1.2, 0.841016877101, 0.841016877101],
        [-1.2, -1.2, -1.2, 0.841016877101, 0.841016877101],
        {"seq_mean_token_mean": -0.17949156145},
    ),
    "gspo paper": (GSPO(), [-1.2, -1.2, -1.2, 0.841016877101, 0.841016877101], None, {}),
    "luspo": (GSPO(clip_low=0.2, clip_high=None), None, None, {"seq_mean_token_sum": -0.958983122899}),
    "gspo token": (
        GSPOToken(clip_low=0.2, clip_high=None),
        None,
        [-1.2, -1.2, -1.2, 0.841016877101, 0.841016877101],
        {"seq_mean_token_mean": -0.17949156145},
    ),
    "sapo": (
        SAPO(),
        [-2.664603305382, -2.090711306836, -2.526088901485, 2.023609762883, 1.262668071193],
        [-1.447867392452, -0.874218052858, -1.322544588864, 1.177081465217, 0.520506693221],
        {"seq_mean_token_mean": -0.391997793765},
    ),
    "gmpo .4": (GMPO(), None, None, {"seq_mean_token_mean": -0.17949156145}),
    "gmpo .1": (
        GMPO(clip_low=0.1),
        [*[-1.2 * 0.967216100482] * 3, *[0.8 * 1.22140275816] * 2],
        None,
        {"seq_mean_token_mean": -0.091768557025},
    ),
    "reinforce": (
        Reinforce(),
        [0.96, 2.76, 0.48, -0.8, -0.88],
        [-1.2, -1.2, -1.2, 0.8, 0.8],
        {
            "token_mean": 0.504,
            "seq_mean_token_mean": 0.28,
            "seq_mean_token_sum": 1.26,
            "dr_grpo_B8": 0.1575,
            "token_sum": 2.52,
        },
    ),
    "vespo": (VESPO(), None, None, {"token_mean": 0.472483092715}),
    "dppo .15": (DPPO(), None, None, {"token_mean": 0.485741992206}),
    "dro .5": (DRO(coef=0.5), None, None, {"token_mean": 0.5315}),
    "decoupled .2/.28": (
        DecoupledClip(clip_high=0.28),
        [-1.619830569091, -0.727836791655, -1.326205101691, 1.457695040312, 0.781697765223],
        None,
        {},
    ),
}


@pytest.mark.parametrize("case", TOKENS)
def test_tokens_slopes_and_reductions(case: str) -> None:
    part, tokens, slopes, reduced = TOKENS[case]
    found = run(part, fixture())
    if tokens is not None:
        assert found.value[MASK].tolist() == pytest.approx(tokens, abs=2e-12)
    if slopes is not None:
        assert found.slope[MASK].tolist() == pytest.approx(slopes, abs=2e-12)
    for name, number in reduced.items():
        reduction, factor = REDUCTIONS[name]
        loss, gradient, _ = window_loss(part, reduction)
        assert loss * factor == pytest.approx(number, abs=2e-12)
        if slopes is not None and name == "token_sum":
            assert [g * factor for g in gradient] == pytest.approx(slopes, abs=2e-12)


def test_gspo_gradient_of_the_summed_sequence_losses() -> None:
    _, gradient, _ = window_loss(GSPO(clip_low=0.2, clip_high=None), SequenceMean())
    expected = [-0.4, -0.4, -0.4, 0.42050843855, 0.42050843855]
    assert [2 * g for g in gradient] == pytest.approx(expected, abs=2e-12)


def test_gspo_on_uneven_lengths_with_junk_under_the_mask() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    tokens = TokenBatch(
        logprobs=rows([0.2, 77.0, 77.0], [0.1, -0.1, 0.3]),
        old_logprobs=torch.zeros(2, 3, dtype=torch.float64),
        advantages=rows([1.0] * 3, [-1.0] * 3),
        layout=PaddedLayout(mask),
    )
    part = GSPO(clip_low=0.3, clip_high=None)
    window = Objective(estimator=GRPO(), policy_loss=part, reduction=SequenceMean()).freeze(
        [(torch.tensor([1.0, -1.0]), tokens.layout)]
    )
    leaf = tokens.logprobs.clone().requires_grad_()
    output = window.loss(tokens.replace(logprobs=leaf))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-0.05811592004226107, abs=1e-15)
    assert leaf.grad is not None
    expected = rows([-0.6107013790800849, 0.0, 0.0], [0.18419515301260794] * 3)
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-15)


def test_vespo_weights() -> None:
    found = run(VESPO(), fixture())
    weights = (found.slope / torch.where(MASK, -fixture().advantages, 1.0))[MASK].tolist()
    assert weights == pytest.approx([1.0] * 3 + [1.0938003193] * 2, abs=1e-10)


def test_sapo_on_policy_value() -> None:
    tokens = fixture()
    found = run(SAPO(), tokens.replace(old_logprobs=tokens.logprobs))
    per_advantage = (found.value / -tokens.advantages)[MASK].tolist()
    assert per_advantage == pytest.approx([2.0] * 3 + [1.904761904762] * 2, abs=1e-12)
    assert found.slope[MASK].tolist() == pytest.approx((-tokens.advantages)[MASK].tolist(), abs=1e-15)


def test_dual_clip_and_ratio_cap_are_different_things() -> None:
    layout = PaddedLayout(torch.ones(1, 1, dtype=torch.bool))
    tokens = TokenBatch(
        logprobs=rows([1.5 - 2]), old_logprobs=rows([-2.0]), advantages=rows([-0.8]), layout=layout
    )
    for options, value, slope in (
        ({}, 3.58535125627, 3.58535125627),
        ({"dual_clip": 3.0}, 2.4, 0.0),
        ({"ratio_cap": 2.0}, 1.6, 0.0),
    ):
        found = run(ClippedSurrogate(**options), tokens)
        assert (found.value.item(), found.slope.item()) == pytest.approx((value, slope), abs=1e-11)


def test_clip_fraction_counts_tokens_without_gradient() -> None:
    ratio = rows([1.5, 1.5, 1.5, 0.5, 1.0, 1.5, 9.0])
    mask = torch.tensor([[True] * 6 + [False]])
    tokens = TokenBatch(
        logprobs=ratio.log(),
        old_logprobs=torch.zeros_like(ratio),
        advantages=rows([1.0, 1.0, -1.0, -1.0, 1.0, 0.0, 1.0]),
        layout=PaddedLayout(mask),
    )
    metrics = run(ClippedSurrogate(), tokens).metrics
    found = [metrics[f"policy/{name}"].value.item() for name in _FRACTIONS]  # type: ignore[attr-defined]
    assert found == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-15)


_FRACTIONS = ("clip_low_fraction", "clip_high_fraction", "clip_fraction")


def test_clip_fractions_of_the_fixture() -> None:
    for part, fraction in ((ClippedSurrogate(), 0.4), (ClippedSurrogate(clip_high=0.28), 0.2)):
        assert window_loss(part, TokenMean())[2]["policy/clip_fraction"] == pytest.approx(fraction)


X = [0.3, -0.4, 0.2, 0.4, -0.2]
KL: dict[str, tuple[list[float], list[float]]] = {
    "k1": (X, [1.0] * 5),
    "k2": ([0.045, 0.08, 0.02, 0.08, 0.02], X),
    "k3": (
        [0.040818220682, 0.091824697641, 0.018730753078, 0.070320046036, 0.02140275816],
        [1 - math.exp(-x) for x in X],
    ),
    "abs": ([abs(x) for x in X], [math.copysign(1.0, x) for x in X]),
    "ratio_k3": (
        [0.049855487324, 0.068025409121, 0.020700683575, 0.115938155656, 0.014346697835],
        [0.366420827448, -0.296327288273, 0.221034183615, 0.65948850828, -0.134064009207],
    ),
}


@pytest.mark.parametrize("estimator", KL)
def test_kl_estimators(estimator: str) -> None:
    values, slopes = KL[estimator]
    found = KLPenalty(coef=1.0, estimator=estimator).value_and_slope(fixture(), context_of(fixture().layout))
    assert found.value[MASK].tolist() == pytest.approx(values, abs=2e-12)
    assert found.slope[MASK].tolist() == pytest.approx(slopes, abs=2e-12)


def test_kl_means_are_over_tokens_whatever_the_reduction() -> None:
    means = {"k1": 0.06, "k2": 0.049, "k3": 0.048619295119}
    for estimator, mean in means.items():
        for reduction in (TokenMean(), SequenceSum(), FixedBudget(max_tokens=8)):
            metrics = window_loss(Reinforce(), reduction, kl=KLPenalty(estimator=estimator))[2]
            assert metrics["policy/kl_to_ref"] == pytest.approx(mean, abs=2e-12)


def test_k3_near_zero_and_far_out() -> None:
    value, _ = kl_estimate(torch.tensor([1e-4, -1e-4], dtype=torch.float32), "k3")
    assert (value >= 0).all()
    assert value.tolist() == pytest.approx([5e-9, 5e-9], rel=2e-3)
    value, _ = kl_estimate(torch.tensor([-1e-5], dtype=torch.float64), "k3")
    assert value.item() == pytest.approx(5.000016667e-11, rel=1e-6)
    pairs = rows([1.0, -1.0, 0.0]).float()
    value, slope = kl_estimate(pairs, "k3")
    assert value.flatten().tolist() == pytest.approx([0.36787944117, 0.71828182846, 0.0], abs=1e-6)
    assert slope.flatten().tolist() == pytest.approx([0.63212055883, -1.71828182846, 0.0], abs=1e-6)
    value, slope = kl_estimate(torch.tensor([-200.0, 200.0]), "k3")
    assert value.isfinite().all()
    assert (value >= 0).all()
    assert slope.isfinite().all()
    assert slope[0] < -1e8, "the penalty pulls hardest where the drift is worst"


def test_masked_junk_never_reaches_loss_gradient_or_metric() -> None:
    mask = torch.tensor([[True, True, False]])
    tokens = TokenBatch(
        logprobs=torch.tensor([[-1.0, -0.5, 0.0]]),
        old_logprobs=torch.tensor([[-1.0, -1.0, -200.0]]),
        ref_logprobs=torch.tensor([[-1.0, -1.0, -math.inf]]),
        advantages=torch.tensor([[1.0, 1.0, math.nan]]),
        layout=PaddedLayout(mask),
    )
    objective = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1))
    window = objective.freeze([(torch.ones(1), tokens.layout)])
    leaf = tokens.logprobs.clone().requires_grad_()
    output = window.loss(tokens.replace(logprobs=leaf))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-1.0946734670143685, rel=1e-6)
    assert leaf.grad is not None
    assert leaf.grad.flatten().tolist() == pytest.approx([-0.5, 0.01967346701436833, 0.0], abs=1e-7)
    assert window.summarize([output])["policy/kl_to_ref"] == pytest.approx(0.05326532985631671, rel=1e-6)
