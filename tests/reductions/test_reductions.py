"""The five reductions against plain Python, on windows with holes, empty rows and dummies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlobjectives import (
    GRPO,
    CapabilityError,
    FixedBudget,
    LossReduction,
    MissingColumnError,
    Objective,
    PaddedLayout,
    PromptMean,
    SequenceMean,
    SequenceSum,
    TokenLayout,
    TokenMean,
)
from rlobjectives.testing.cases import Shard, draw_case
from tests.oracles import reductions as oracle

PUBLISHED = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, float("nan")]], dtype=torch.float64)


def total(reduction: LossReduction, layout: TokenLayout, losses: Tensor) -> float:
    """``Σ w·ℓ`` of one window in one micro-batch."""
    window = Objective(estimator=GRPO(), reduction=reduction).freeze(
        [(torch.zeros(layout.num_sequences, dtype=torch.float64), layout)]
    )
    return float((window.weights(layout) * layout.select(losses)).sum())


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (TokenMean(), 3.0),
        (SequenceMean(), 3.25),
        (SequenceSum(), 7.5),
        (FixedBudget(max_tokens=8), 0.9375),
    ],
    ids=lambda value: type(value).__name__,
)
def test_published_numbers(reduction: LossReduction, expected: float) -> None:
    layout = PaddedLayout(~PUBLISHED.isnan())
    assert total(reduction, layout, PUBLISHED) == pytest.approx(expected, rel=1e-15)


def test_published_prompt_mean() -> None:
    layout = PaddedLayout(~PUBLISHED.isnan())
    apart, together = (layout.with_prompts(torch.tensor(ids)) for ids in ([3, -1], [5, 5]))
    assert total(PromptMean(), apart, PUBLISHED) == pytest.approx(3.25, rel=1e-15)
    assert total(PromptMean(), together, PUBLISHED) == pytest.approx(3.0, rel=1e-15)


REDUCTIONS: list[tuple[LossReduction, Any]] = [
    (TokenMean(), lambda losses, ids: oracle.token_mean(losses)),
    (SequenceMean(), lambda losses, ids: oracle.sequence_mean(losses)),
    (SequenceMean(count="nonempty"), lambda losses, ids: oracle.sequence_mean(losses, "nonempty")),
    (SequenceSum(), lambda losses, ids: oracle.sequence_sum(losses)),
    (SequenceSum(count="nonempty"), lambda losses, ids: oracle.sequence_sum(losses, "nonempty")),
    (FixedBudget(max_tokens=7), lambda losses, ids: oracle.fixed_budget(losses, 7)),
    (
        FixedBudget(max_tokens=7, count="nonempty"),
        lambda losses, ids: oracle.fixed_budget(losses, 7, "nonempty"),
    ),
    (PromptMean(), oracle.prompt_mean),
]


@pytest.mark.parametrize(
    ("reduction", "expected"), REDUCTIONS, ids=lambda value: getattr(value, "__name__", repr(value))
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**20), packed=st.booleans(), empty=st.sampled_from((0.0, 0.4)))
def test_oracles(reduction: LossReduction, expected: Any, seed: int, packed: bool, empty: float) -> None:
    case = draw_case(seed, (2, 3, 2), empty_rows=empty)
    rows, shard = torch.arange(case.count), Shard(packed=packed, extra=2)
    losses = case.columns["values"]
    found = total(reduction, case.arrange(rows, shard), case.lay(losses, rows, shard))
    ragged = [row[flags].tolist() for row, flags in zip(losses, case.mask, strict=True)]
    assert found == pytest.approx(expected(ragged, case.group_ids.tolist()), rel=1e-12, abs=1e-14)


def test_a_dummy_row_is_no_sequence() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    losses = torch.tensor([[1.0, 3.0], [7.0, 7.0]])
    plain, marked = PaddedLayout(mask), PaddedLayout(mask, sequence_mask=torch.tensor([True, False]))
    assert total(SequenceSum(), plain, losses) == 2.0  # a fully masked answer is an answer
    assert total(SequenceSum(), marked, losses) == 4.0  # a dummy is not
    assert total(FixedBudget(max_tokens=4), marked, losses) == 1.0


def test_prompts_whose_answers_are_all_masked_still_count() -> None:
    layout = PaddedLayout(torch.tensor([[True], [False]])).with_prompts(torch.tensor([0, 1]))
    assert total(PromptMean(), layout, torch.tensor([[3.0], [9.0]])) == 1.5


def test_the_budget_is_a_positive_integer() -> None:
    for bad in (0, -1, True, 8.0, None, "8"):
        with pytest.raises(CapabilityError, match="max_tokens is"):
            FixedBudget(max_tokens=bad)
    with pytest.raises(TypeError):
        FixedBudget()  # type: ignore[call-arg]


def test_changing_the_budget_rescales_only_the_fixed_budget() -> None:
    layout = PaddedLayout(~PUBLISHED.isnan())
    assert total(FixedBudget(max_tokens=16), layout, PUBLISHED) == 0.46875


@pytest.mark.parametrize("kind", [SequenceMean, SequenceSum])
def test_the_count_is_a_choice(kind: type[SequenceMean | SequenceSum]) -> None:
    with pytest.raises(CapabilityError, match="count is 'some'"):
        kind(count="some")


def test_prompt_mean_says_what_it_needs() -> None:
    layout = PaddedLayout(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(MissingColumnError, match="with_prompts"):
        total(PromptMean(), layout, torch.zeros(2, 2))
