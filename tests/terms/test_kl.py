"""KL penalties: every estimator, the clamps, and the exact divergence over the vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlobjectives import (
    GAE,
    GRPO,
    CapabilityError,
    Combined,
    KLPenalty,
    Objective,
    PaddedLayout,
    Reinforce,
    ReinforcePlusPlus,
    ReMax,
    Rollouts,
    TokenBatch,
    TrainerFacts,
)
from rlobjectives.functional import kl_estimate, vocabulary_divergence
from tests.losses.batches import Batch, context_of, counted, run
from tests.oracles import losses as oracle
from tests.oracles.dual import value_and_slope

SAMPLED = ("k1", "k2", "k3", "abs", "k1+", "k3+", "ratio_k3")
LENGTHS = [4, 1, 0, 7]


@pytest.mark.parametrize("estimator", SAMPLED)
def test_value_and_slope_match_the_formula(estimator: str) -> None:
    batch = Batch.random(LENGTHS, seed=5)
    values, slopes = [], []
    for place in range(len(LENGTHS)):
        row = {name: rows[place] for name, rows in batch.columns.items()}
        value, slope = value_and_slope(
            lambda l: oracle.kl(l, row["ref_logprobs"], estimator, row["old_logprobs"]),
            row["logprobs"],
        )
        values += value
        slopes += slope
    for tokens in (batch.padded(), batch.packed()):
        found: Any = run(KLPenalty(coef=0.3, estimator=estimator), tokens)
        assert counted(found.value, tokens.layout) == pytest.approx([0.3 * v for v in values], rel=1e-11)
        assert counted(found.slope, tokens.layout) == pytest.approx([0.3 * s for s in slopes], rel=1e-11)
        expected = math.fsum(values) / len(values)
        if estimator != "ratio_k3":  # its metric is the plain k3, which compares across policies
            assert found.metrics["policy/kl_to_ref"].value.item() == pytest.approx(expected, rel=1e-11)


def test_ratio_k3_has_the_exact_gradient_however_far_out() -> None:
    for drift in (-60.0, -21.0, -5.0, 0.0, 5.0, 21.0, 60.0):
        layout = PaddedLayout(torch.ones(1, 1, dtype=torch.bool))
        one = torch.ones(1, 1, dtype=torch.float64)
        tokens = TokenBatch(
            logprobs=-80 * one, old_logprobs=-80.4 * one, ref_logprobs=(-80 - drift) * one, layout=layout
        )
        found = run(KLPenalty(coef=1.0, estimator="ratio_k3"), tokens)
        assert found.slope.item() == pytest.approx(math.exp(0.4) * drift, rel=1e-9, abs=1e-12)


def test_the_output_clamp_leaves_no_gradient_and_is_off_by_default() -> None:
    x = torch.tensor([-2.0, -2.7, -30.0, 12.0], dtype=torch.float64)
    value, slope = kl_estimate(x, "k3", output_clamp=10.0)
    assert value.tolist() == pytest.approx([math.exp(2) - 3, 10.0, 10.0, 10.0])
    assert slope.tolist() == pytest.approx([1 - math.exp(2), 0.0, 0.0, 0.0])
    _, kept = kl_estimate(x, "k3")
    assert (kept[1:3] < -10).all()
    value, slope = kl_estimate(x, "k3+", output_clamp=10.0)
    assert value[2].item() == 10.0
    assert slope.tolist() == x.tolist(), "a straight-through slope is never clamped"


def test_masked_junk_stays_out() -> None:
    batch = Batch.random(LENGTHS, seed=6)
    for estimator in SAMPLED:
        part = KLPenalty(estimator=estimator)
        clean, dirty = batch.padded(fill=0.0), batch.padded(fill=math.nan)
        assert counted(run(part, clean).value, clean.layout) == counted(run(part, dirty).value, dirty.layout)
        assert counted(run(part, clean).slope, clean.layout) == counted(run(part, dirty).slope, dirty.layout)


def test_full_vocabulary_matches_its_sum_and_its_gradient() -> None:
    torch.manual_seed(0)
    layout = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    logits[~layout.mask] = torch.nan
    reference = torch.randn(2, 3, 5, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    kl = vocabulary_divergence(leaf, reference, layout, beta=1.0)
    tokens = TokenBatch(
        logprobs=torch.full((2, 3), -1.0, dtype=torch.float64),
        advantages=torch.zeros(2, 3, dtype=torch.float64),
        ref_kl=kl,
        layout=layout,
    )
    objective = Objective(estimator=GRPO(), policy_loss=Reinforce(), kl=KLPenalty(coef=0.3, estimator="full"))
    window = objective.freeze([(torch.zeros(2), layout)])
    output = window.loss(tokens)
    output.loss.backward()
    assert leaf.grad is not None
    total, expected = 0.0, torch.zeros_like(logits)
    for b, t in layout.mask.nonzero().tolist():
        p = [math.exp(v - _lse(logits[b, t].tolist())) for v in logits[b, t].tolist()]
        q = [math.exp(v - _lse(reference[b, t].tolist())) for v in reference[b, t].tolist()]
        here = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
        total += here
        for v, (x, y) in enumerate(zip(p, q, strict=True)):
            expected[b, t, v] = 0.3 / 3 * x * (math.log(x / y) - here)
    assert output.loss.detach().item() == pytest.approx(0.3 * total / 3, rel=1e-12)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-11, atol=1e-14)
    assert window.summarize([output])["policy/kl_to_ref"] == pytest.approx(total / 3, rel=1e-12)


def _lse(row: list[float]) -> float:
    return math.log(math.fsum(math.exp(v) for v in row))


def test_full_vocabulary_says_what_it_needs() -> None:
    part = KLPenalty(estimator="full")
    assert not part.required().needs_ref_logprobs
    with pytest.raises(CapabilityError, match="logits"):
        Objective(estimator=GRPO(), kl=part).check(TrainerFacts(offers={"ref_logprobs": False}))
    tokens = Batch.random([2]).padded()
    with pytest.raises(LookupError, match="ref_kl"):
        part.value_and_slope(tokens, context_of(tokens.layout))


def test_options_out_of_range_are_refused() -> None:
    for options in ({"estimator": "k4"}, {"coef": -1.0}, {"output_clamp": 0.0}):
        with pytest.raises(CapabilityError):
            KLPenalty(**options)
    with pytest.raises(CapabilityError, match="exact gradient"):
        KLPenalty(estimator="ratio_k3", output_clamp=10.0)


def test_a_reference_that_is_the_policy_costs_nothing() -> None:
    tokens = Batch.random(LENGTHS).padded()
    tokens = replace(tokens, ref_logprobs=tokens.logprobs)
    for estimator in ("k2", "k3", "abs", "k3+", "ratio_k3"):
        found = run(KLPenalty(estimator=estimator), tokens)
        assert (found.value[tokens.layout.mask] == 0).all()
        assert (found.slope[tokens.layout.mask] == 0).all()


# A divergence in the rewards ------------------------------------------------------------------------

CHARGED = [
    ReinforcePlusPlus(kl_coef=0.01),
    ReMax(kl_coef=0.01),
    GAE(kl_coef=0.01),
    Combined(estimators=(GRPO(), ReinforcePlusPlus(kl_coef=0.01))),
]


@pytest.mark.parametrize("estimator", CHARGED)
def test_one_divergence_is_not_charged_twice(estimator: Any) -> None:
    kl = KLPenalty(coef=0.04)
    with pytest.raises(CapabilityError, match=r"kl_coef = 0\.01.*coef=0\.04.*Keep one"):
        Objective(estimator=estimator, kl=kl)
    Objective(estimator=estimator, kl=KLPenalty(coef=0.0))  # reports, and charges nothing
    Objective(estimator=ReinforcePlusPlus(kl_coef=0.0), kl=kl)


def test_the_divergence_is_reported_without_a_penalty() -> None:
    """Whenever a part reads the reference: in the definition of the penalty that is not there."""
    layout = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))
    old = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -2.0, math.nan], [-0.25, math.nan, math.nan]], dtype=torch.float64)
    expected = math.fsum(math.exp(-x) - 1.0 + x for x in (0.5, 0.0, -0.25)) / 3
    rollouts = Rollouts(
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        layout=layout,
        old_logprobs=old,
        ref_logprobs=reference,
    )
    for estimator, given in ((ReinforcePlusPlus(kl_coef=0.01), True), (ReinforcePlusPlus(), False)):
        objective = Objective(estimator=estimator)
        estimate = estimator.estimate(rollouts)
        window = objective.freeze([(estimate, layout)])
        tokens = TokenBatch(
            logprobs=old,
            layout=layout,
            ref_logprobs=reference,
            advantages=window.advantages(estimate, layout),
        )
        report = window.summarize([window.loss(tokens)])
        assert ("policy/kl_to_ref" in report) == given
        assert ("policy/kl_to_ref" in objective.declared_metrics()) == given
        if given:
            assert report["policy/kl_to_ref"] == pytest.approx(expected, rel=1e-12)
            bare = window.summarize([window.loss(tokens.replace(ref_logprobs=None))])
            assert "policy/kl_to_ref" not in bare
