"""Every policy loss: value and slope against dual numbers, in both layouts, far out, on context shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlobjectives import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    CapabilityError,
    ClippedSurrogate,
    DecoupledClip,
    GSPOToken,
    PaddedLayout,
    Reinforce,
    TokenBatch,
)
from rlobjectives.losses import PolicyLoss
from tests.losses.batches import Batch, context_of, counted, run
from tests.oracles import losses as oracle
from tests.oracles.dual import Dual, value_and_slope

Oracle = Callable[[list[Dual], dict[str, list[float]]], list[Dual]]


def _of(function: Callable[..., list[Dual]], *options: Any, extra: tuple[str, ...] = ()) -> Oracle:
    def loss(logprobs: list[Dual], row: dict[str, list[float]]) -> list[Dual]:
        more = [row[name] for name in extra]
        return function(logprobs, row["old_logprobs"], row["advantages"], *more, *options)

    return loss


def _on_behavior(loss: Oracle) -> Oracle:
    return lambda logprobs, row: loss(logprobs, {**row, "old_logprobs": row["behavior_logprobs"]})


CASES: dict[str, tuple[PolicyLoss, Oracle]] = {
    "clipped": (ClippedSurrogate(clip_high=0.28), _of(oracle.clipped, 0.2, 0.28)),
    "cispo": (CISPO(clip_low=0.2, clip_high=0.28), _of(oracle.cispo, "two_sided", 0.2, 0.28, 0.0)),
    "cispo_paper": (CISPO(), _of(oracle.cispo, "two_sided", 1.0, 10.0, 0.0)),
    "cispo_upper": (CISPO(bounds="upper", ratio_cap=1.3), _of(oracle.cispo, "upper", 0.0, 0.0, 1.3)),
    "cispo_sign": (
        CISPO(bounds="sign", clip_low=0.2, clip_high=0.28),
        _of(oracle.cispo, "sign", 0.2, 0.28, 0.0),
    ),
    "gspo": (GSPO(clip_low=0.1, clip_high=None), _of(oracle.gspo, 0.1, 0.1)),
    "gspo_paper": (GSPO(), _of(oracle.gspo, 3e-4, 4e-4)),
    "gspo_token": (GSPOToken(clip_low=0.1, clip_high=0.15), _of(oracle.gspo_token, 0.1, 0.15)),
    "sapo": (SAPO(), _of(oracle.sapo, 1.0, 1.05)),
    "gmpo": (GMPO(), _of(oracle.gmpo, 0.4, 0.4)),
    "gmpo_narrow": (GMPO(clip_low=0.1, clip_high=0.2), _of(oracle.gmpo, 0.1, 0.2)),
    "vespo": (VESPO(), _of(oracle.vespo, (2.0, 3.0), (3.0, 2.0))),
    "vespo_behavior": (VESPO(base="behavior"), _on_behavior(_of(oracle.vespo, (2.0, 3.0), (3.0, 2.0)))),
    "dppo": (DPPO(clip_low=0.1), _of(oracle.dppo, "tv", 0.1, 0.1, 20.0)),
    "dppo_kl": (DPPO(divergence="kl", clip_high=0.02), _of(oracle.dppo, "kl", 0.05, 0.02, 20.0)),
    "dppo_behavior": (
        DPPO(base="behavior", ratio_cap=1.1),
        _on_behavior(_of(oracle.dppo, "tv", 0.15, 0.15, 1.1)),
    ),
    "dro": (DRO(coef=0.5), _of(oracle.dro, 0.5)),
    "decoupled": (
        DecoupledClip(),
        _of(oracle.decoupled, 0.2, 0.2, math.inf, False, extra=("behavior_logprobs",)),
    ),
    "decoupled_clamp": (
        DecoupledClip(clip_high=0.28, behavior_cap=1.2),
        _of(oracle.decoupled, 0.2, 0.28, 1.2, False, extra=("behavior_logprobs",)),
    ),
    "decoupled_mask": (
        DecoupledClip(clip_high=0.28, behavior_cap=1.2, over_cap="mask"),
        _of(oracle.decoupled, 0.2, 0.28, 1.2, True, extra=("behavior_logprobs",)),
    ),
    "reinforce": (Reinforce(), _of(oracle.reinforce, "none", math.inf)),
    "reinforce_token": (Reinforce(weight="token", weight_cap=1.5), _of(oracle.reinforce, "token", 1.5)),
    "reinforce_sequence": (Reinforce(weight="sequence"), _of(oracle.reinforce, "sequence", math.inf)),
    "reinforce_behavior": (
        Reinforce(weight="token", base="behavior"),
        _on_behavior(_of(oracle.reinforce, "token", math.inf)),
    ),
}
LENGTHS = [5, 1, 0, 9, 3]
every_loss = pytest.mark.parametrize("case", CASES)


def expected(loss: Oracle, batch: Batch) -> tuple[list[float], list[float]]:
    values: list[float] = []
    slopes: list[float] = []
    for place in range(len(batch.lengths)):
        row = {name: rows[place] for name, rows in batch.columns.items()}
        value, slope = value_and_slope(lambda logprobs: loss(logprobs, row), row["logprobs"])
        values += value
        slopes += slope
    return values, slopes


@every_loss
@pytest.mark.parametrize("token_advantages", [False, True], ids=["one_advantage", "token_advantages"])
@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_value_and_slope_match_the_formula(case: str, token_advantages: bool, spread: float) -> None:
    part, loss = CASES[case]
    batch = Batch.random(LENGTHS, seed=len(case), spread=spread, token_advantages=token_advantages)
    values, slopes = expected(loss, batch)
    for tokens in (batch.padded(), batch.packed()):
        found = run(part, tokens)
        assert counted(found.value, tokens.layout) == pytest.approx(values, rel=1e-11, abs=1e-13)
        assert counted(found.slope, tokens.layout) == pytest.approx(slopes, rel=1e-11, abs=1e-13)


@every_loss
def test_what_the_mask_hides_changes_nothing(case: str) -> None:
    part, _ = CASES[case]
    batch = Batch.random(LENGTHS, seed=1)
    clean = batch.padded(fill=0.0)
    base = run(part, clean)
    for fill in (math.nan, math.inf, -math.inf, 1e30):
        dirty = batch.padded(fill=fill)
        found = run(part, dirty)
        assert counted(found.value, dirty.layout) == counted(base.value, clean.layout)
        assert counted(found.slope, dirty.layout) == counted(base.slope, clean.layout)
        assert {n: s.row.tolist() for n, s in found.metrics.items()} == {
            n: s.row.tolist() for n, s in base.metrics.items()
        }


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite_and_zero_advantage_gives_nothing(case: str, dtype: torch.dtype) -> None:
    part, _ = CASES[case]
    far = [-0.001, -100.001, -0.5, -60.0, -1.0]
    batch = Batch(
        {
            "logprobs": [far, far[::-1], [-100.0], [-0.001], []],
            "old_logprobs": [far[::-1], far, [-0.001], [-100.0], []],
            "behavior_logprobs": [far, far, [-50.0], [-0.001], []],
            "advantages": [[2.0] * 5, [-2.0] * 5, [1.0], [-1.0], []],
        }
    )
    found = run(part, batch.padded(dtype))
    mask = batch.padded(dtype).layout.mask
    assert found.value[mask].isfinite().all()
    assert found.slope[mask].isfinite().all()
    assert all(stat.row.isfinite().all() for stat in found.metrics.values())
    idle = replace(batch.padded(dtype), advantages=torch.zeros_like(batch.padded(dtype).logprobs))
    still = run(part, idle)
    if not isinstance(part, DRO):  # its leash pulls whatever the advantage
        assert (still.value[mask] == 0).all()
        assert (still.slope[mask] == 0).all()


@every_loss
def test_a_batch_without_counted_tokens_is_finite(case: str) -> None:
    part, _ = CASES[case]
    mask = torch.zeros(2, 3, dtype=torch.bool)
    junk = torch.full(mask.shape, torch.nan)
    tokens = TokenBatch(
        logprobs=junk, old_logprobs=junk, behavior_logprobs=junk, advantages=junk, layout=PaddedLayout(mask)
    )
    found = run(part, tokens)
    assert found.value.shape == mask.shape
    assert found.value.isfinite().all()
    assert found.slope.isfinite().all()
    assert all(stat.row.isfinite().all() for stat in found.metrics.values())


@every_loss
def test_a_policy_that_has_not_moved_needs_no_old_column(case: str) -> None:
    part, _ = CASES[case]
    tokens = Batch.random(LENGTHS, seed=3).padded()
    moved = run(part, replace(tokens, old_logprobs=tokens.logprobs))
    fresh = run(part, replace(tokens, old_logprobs=None))
    assert torch.equal(moved.value[tokens.layout.mask], fresh.value[tokens.layout.mask])
    assert torch.equal(moved.slope[tokens.layout.mask], fresh.slope[tokens.layout.mask])


@every_loss
def test_context_shards_agree_with_whole_sequences(case: str) -> None:
    part, _ = CASES[case]
    batch = Batch.random([6, 4, 1, 8], seed=4, token_advantages=True)
    whole = batch.padded(fill=0.0, extra=0)
    base = run(part, whole)
    width, cut = whole.layout.mask.shape[1], 3
    shards = [slice(0, cut), slice(cut, width)]
    pieces = [
        TokenBatch(
            layout=PaddedLayout(whole.layout.mask[:, span]),
            **{name: getattr(whole, name)[:, span] for name in batch.columns},
        )
        for span in shards
    ]
    for span, shard in zip(shards, pieces, strict=True):
        # A rank meets the others' sums: run every other rank first and add what it would have sent.
        sent: list[torch.Tensor] = []

        def send(local: torch.Tensor, sent=sent) -> torch.Tensor:
            sent.append(local)
            return local

        for other in pieces:
            if other is not shard:
                listening = replace(context_of(other.layout), context_sum=send)
                part.value_and_slope(other.detach(), listening)
        calls = []

        def context_sum(local: torch.Tensor, sent=sent, calls=calls) -> torch.Tensor:
            calls.append(local)
            return local + sum(sent)

        found = part.value_and_slope(
            shard.detach(), replace(context_of(shard.layout), context_sum=context_sum)
        )
        mask = shard.layout.mask
        assert len(calls) <= 1, "one sum over the context-parallel ranks is enough"
        torch.testing.assert_close(found.value[mask], base.value[:, span][mask], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.slope[mask], base.slope[:, span][mask], rtol=1e-12, atol=1e-14)


@every_loss
def test_metrics_are_declared_with_their_kinds(case: str) -> None:
    part, _ = CASES[case]
    found = run(part, Batch.random(LENGTHS).padded())
    assert {name: type(stat) for name, stat in found.metrics.items()} == {
        name: metric.kind for name, metric in part.declared_metrics().items() if name in found.metrics
    }
    missing = set(part.declared_metrics()) - set(found.metrics)
    assert missing <= {"policy/dual_clip_fraction"}


@every_loss
def test_a_missing_advantage_is_an_error(case: str) -> None:
    part, _ = CASES[case]
    tokens = replace(Batch.random(LENGTHS).padded(), advantages=None)
    with pytest.raises(LookupError, match=type(part).__name__ + r" reads advantages"):
        run(part, tokens)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CISPO, {"bounds": "both"}),
        (CISPO, {"clip_low": 1.5}),
        (CISPO, {"ratio_cap": 0.0}),
        (GSPO, {"clip_low": -0.1}),
        (GSPOToken, {"clip_high": math.nan}),
        (SAPO, {"temperature_negative": 0.0}),
        (GMPO, {"clip_high": -1.0}),
        (VESPO, {"rate_positive": 0.0}),
        (VESPO, {"base": "reference"}),
        (DPPO, {"divergence": "js"}),
        (DPPO, {"ratio_cap": True}),
        (DRO, {"coef": 0.0}),
        (DecoupledClip, {"over_cap": "drop"}),
        (DecoupledClip, {"behavior_cap": -1.0}),
        (Reinforce, {"weight": "product"}),
        (Reinforce, {"weight_cap": 0}),
        (SAPO, {"log_ratio_clamp": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[PolicyLoss], options: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError, match=next(iter(options))):
        kind(**options)
