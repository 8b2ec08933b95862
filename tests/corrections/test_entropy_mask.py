"""The entropy mask: an exact quantile of the window, whatever its cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlobjectives import (
    GRPO,
    GSPO,
    CapabilityError,
    EntropyMask,
    Objective,
    PaddedLayout,
    SequenceMean,
    TokenBatch,
    TokenMean,
)
from rlobjectives.maths.quantile import ROUNDS, quantile_histogram, window_cutoff, window_quantile


def merged_rounds(
    values: Tensor, mask: Tensor, fraction: float, cuts: int = 1, largest: bool = False
) -> list:
    rounds: list = []
    for _ in range(ROUNDS):
        pieces = [
            quantile_histogram(v, m, rounds, fraction, largest=largest)
            for v, m in zip(values.chunk(cuts), mask.chunk(cuts), strict=True)
        ]
        merged = pieces[0]
        for piece in pieces[1:]:
            merged = merged.merge(piece)
        rounds.append(merged)
    return rounds


def exact(values: Tensor, mask: Tensor, fraction: float, cuts: int = 1) -> float:
    return window_quantile(merged_rounds(values, mask, fraction, cuts), fraction).item()


def sorted_order_statistic(values: list[float], fraction: float) -> float:
    rank = math.ceil(fraction * (len(values) - 1) - 1e-9)
    return sorted(values)[max(rank, 0)]


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(FLOATS, min_size=1, max_size=40), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), st.integers(1, 4)
)
def test_quantile_is_the_sorted_one_for_any_floats(numbers: list[float], fraction: float, cuts: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    cuts = min(cuts, len(numbers))
    cuts = len(values.chunk(cuts))
    found = exact(values, torch.ones(len(numbers), dtype=torch.bool), fraction, cuts)
    assert found == sorted_order_statistic(numbers, fraction)


@settings(max_examples=60, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.sampled_from([0.01, 0.2, 0.5, 1.0]), st.booleans())
def test_the_cutoff_lies_half_way_to_the_next_smaller_value(
    numbers: list[float], fraction: float, largest: bool
) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    rounds = merged_rounds(values, torch.ones(len(numbers), dtype=torch.bool), fraction, 1, largest)
    threshold, ordered = window_quantile(rounds, fraction, largest=largest).item(), sorted(numbers)
    if largest:
        assert threshold == ordered[-max(1, math.floor(fraction * len(ordered) + 1e-9))]
    below = [x for x in ordered if x < threshold]
    found = window_cutoff(rounds, fraction, largest=largest).item()
    assert found == ((threshold + below[-1]) / 2 if below else -math.inf)
    assert ((values >= found) == (values >= threshold)).all()


def test_kept_tokens_are_those_that_interpolation_keeps() -> None:
    torch.manual_seed(0)
    values = torch.rand(1000).square() * 3
    mask = torch.rand(1000) > 0.3
    for fraction in (0.05, 0.5, 0.8, 0.9):
        threshold = exact(values, mask, fraction)
        theirs = torch.quantile(values[mask].double(), fraction)
        assert torch.equal(values[mask] >= threshold, values[mask].double() >= theirs)


def test_nothing_counted_and_all_equal() -> None:
    assert exact(torch.full((3,), math.nan), torch.zeros(3, dtype=torch.bool), 0.5) == -math.inf
    assert exact(torch.full((3,), 0.7), torch.ones(3, dtype=torch.bool), 0.9) == pytest.approx(0.7)


LENGTHS = [5, 2, 7, 1, 4, 6]


def columns() -> tuple[PaddedLayout, dict[str, Tensor]]:
    torch.manual_seed(3)
    mask = torch.arange(7) < torch.tensor(LENGTHS).unsqueeze(1)
    found = {name: -torch.rand(6, 7, dtype=torch.float64) for name in ("logprobs", "old_logprobs")}
    found["entropy"] = torch.rand(6, 7, dtype=torch.float64)
    found["entropy"][~mask] = torch.nan
    return PaddedLayout(mask), found


def window_of(mask: EntropyMask, cuts: list[slice], reduction: object = None) -> tuple[float, Tensor, dict]:
    layout, data = columns()
    advantages = torch.linspace(-1, 1, 6, dtype=torch.float64)
    objective = Objective(estimator=GRPO(), entropy_mask=mask, reduction=reduction or TokenMean())
    builder = objective.window()
    batches = []
    for rows in cuts:
        piece = layout.rows(rows)
        tokens = TokenBatch(layout=piece, **{name: column[rows] for name, column in data.items()})
        builder.add(estimate=advantages[rows], layout=piece)
        builder.add_prepass(tokens)
        batches.append((rows, tokens))
    window = builder.freeze()
    leaf = data["logprobs"].clone().requires_grad_()
    outputs = []
    for rows, tokens in batches:
        ready = tokens.replace(
            logprobs=leaf[rows], advantages=window.advantages(advantages[rows], tokens.layout)
        )
        outputs.append(window.loss(ready))
    sum(output.loss for output in outputs).backward()
    assert leaf.grad is not None
    total = float(sum(output.loss.detach() for output in outputs))
    return total, leaf.grad, window.summarize(outputs)


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("reduction", [TokenMean(), SequenceMean()], ids=["token_mean", "sequence_mean"])
def test_any_cut_of_the_window_gives_the_same(denominator: str, reduction: object) -> None:
    mask = EntropyMask(fraction=0.3, denominator=denominator)
    whole = window_of(mask, [slice(0, 6)], reduction)
    for cuts in ([slice(0, 1), slice(1, 6)], [slice(i, i + 1) for i in range(6)]):
        loss, gradient, metrics = window_of(mask, cuts, reduction)
        assert loss == pytest.approx(whole[0], rel=1e-13)
        torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-16)
        assert metrics == pytest.approx(whole[2], rel=1e-12)


def test_dropped_tokens_lose_their_gradient_and_the_denominator_is_explicit() -> None:
    layout, data = columns()
    entropy = data["entropy"][layout.mask].float().tolist()
    threshold = sorted_order_statistic(entropy, 0.7)
    kept = layout.mask & (data["entropy"].float() >= threshold)
    original = window_of(EntropyMask(fraction=0.3), [slice(0, 6)])
    shrunk = window_of(EntropyMask(fraction=0.3, denominator="kept"), [slice(0, 6)])
    whole = window_of(EntropyMask(fraction=1.0), [slice(0, 6)])
    assert (original[1][~kept] == 0).all()
    assert (original[1][kept] == whole[1][kept]).all()
    share = sum(LENGTHS) / int(kept.sum())
    torch.testing.assert_close(shrunk[1], original[1] * share, rtol=1e-13, atol=0)
    assert shrunk[0] == pytest.approx(original[0] * share, rel=1e-13)
    assert original[2]["entropy_mask/kept_fraction"] == pytest.approx(1 / share)
    assert original[2]["entropy_mask/threshold"] == pytest.approx(threshold, rel=1e-7)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(CapabilityError, match="drops single tokens"):
        Objective(estimator=GRPO(), policy_loss=GSPO(), entropy_mask=EntropyMask())
    for options in ({"fraction": 0.0}, {"fraction": 1.1}, {"denominator": "all"}):
        with pytest.raises(CapabilityError):
            EntropyMask(**options)
    layout, data = columns()
    builder = Objective(estimator=GRPO(), entropy_mask=EntropyMask()).window()
    builder.add(estimate=torch.zeros(6), layout=layout)
    builder.add_prepass(TokenBatch(logprobs=data["logprobs"], layout=layout))
    with pytest.raises(LookupError, match="reads entropy"):
        builder.freeze()
