"""Padded and packed layouts do the same operations on the same sequences."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlobjectives import MissingColumnError, PackedLayout, PaddedLayout, ShapeError, TokenLayout
from rlobjectives.testing.cases import Shard, draw_case

MASK = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
COLUMN = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]])
LENGTHS = (3, 0, 2)


def packed(rows: Tensor) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(rows, LENGTHS, strict=True)])


def both() -> list[tuple[TokenLayout, Tensor]]:
    bounds = torch.tensor([0, 3, 3, 5])
    return [(PaddedLayout(MASK), COLUMN), (PackedLayout(bounds, packed(MASK)), packed(COLUMN))]


each_layout = pytest.mark.parametrize("place", [0, 1], ids=["padded", "packed"])


def test_boundaries_may_stay_on_the_host() -> None:
    """They are read without a wait there, and lie beside the mask afterwards."""
    layout = PackedLayout(torch.tensor([0, 3, 3, 5]), packed(MASK).to("meta"))
    assert layout.cu_seqlens.device == layout.index.device == layout.device == torch.device("meta")
    assert (layout.width, layout.shortest, layout.num_sequences) == (3, 0, 3)
    assert layout.segment_sum(packed(COLUMN).to("meta")).shape == (3,)
    assert layout.cumulative_sum(packed(COLUMN).to("meta")).shape == (5,)


@each_layout
def test_sums_and_counts(place: int) -> None:
    layout, column = both()[place]
    assert layout.num_sequences == 3
    assert layout.segment_sum(column).tolist() == [5.0, 0.0, 192.0]
    assert layout.token_counts().tolist() == [2.0, 0.0, 2.0]
    assert layout.token_counts().dtype == torch.float64
    assert layout.shape == tuple(column.shape)
    assert layout.select(column, -1.0)[layout.mask].tolist() == [1.0, 4.0, 64.0, 128.0]
    assert (layout.select(column, -1.0)[~layout.mask] == -1.0).all()


@each_layout
def test_expand_gives_each_token_its_sequence(place: int) -> None:
    layout, _ = both()[place]
    spread = layout.expand(torch.tensor([1.0, 2.0, 3.0]))
    assert spread[layout.mask].tolist() == [1.0, 1.0, 3.0, 3.0]
    with pytest.raises(ShapeError, match="one entry per sequence"):
        layout.expand(torch.ones(2))


@each_layout
def test_masked_garbage_stays_out_of_sums_and_their_gradient(place: int) -> None:
    layout, column = both()[place]
    dirty = torch.where(layout.mask, column, torch.nan).requires_grad_()
    sums = layout.segment_sum(dirty)
    sums.sum().backward()
    assert sums.tolist() == [5.0, 0.0, 192.0]
    assert torch.equal(dirty.grad, layout.mask.float())


@each_layout
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_flags_and_integers_are_counted(place: int, dtype: torch.dtype) -> None:
    layout, column = both()[place]
    sums = layout.segment_sum(torch.full(column.shape, 200).to(dtype))
    assert sums.dtype is torch.int64
    assert torch.equal(sums, layout.local_counts().long() * (1 if dtype is torch.bool else 200))


@each_layout
@pytest.mark.parametrize(
    "index", [torch.tensor([2, 0]), torch.tensor([1]), slice(1, 3), torch.tensor([0, 0])]
)
def test_rows_choose_repeat_and_reorder(place: int, index: Tensor | slice) -> None:
    layout, column = both()[place]
    layout = layout.with_facts(total_tokens=torch.tensor([9.0, 8.0, 7.0]))
    chosen, part = layout.rows(index), layout.rows_of(column, index)
    expected = torch.tensor([5.0, 0.0, 192.0])[index]
    assert torch.equal(chosen.segment_sum(part), expected)
    assert torch.equal(chosen.token_counts(), torch.tensor([9.0, 8.0, 7.0], dtype=torch.float64)[index])
    assert type(chosen) is type(layout)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**20))
def test_the_two_agree_on_random_windows(seed: int) -> None:
    case = draw_case(seed, (2, 3))
    order = torch.randperm(case.count, generator=torch.Generator().manual_seed(seed))
    column = case.columns["values"]
    found = []
    for shard in (Shard(extra=2), Shard(packed=True)):
        layout, laid = case.arrange(order, shard), case.lay(column, order, shard)
        found.append(torch.stack([layout.segment_sum(laid), layout.token_counts()]))
        assert torch.equal(case.lift(laid, order, shard)[case.mask[order]], column[order][case.mask[order]])
    assert torch.allclose(found[0], found[1], rtol=1e-14, atol=1e-14)


@each_layout
def test_facts_are_checked_and_copied(place: int) -> None:
    layout, _ = both()[place]
    more = layout.with_facts(sequence_mask=torch.tensor([True, False, True]))
    assert more.sequence_mask().tolist() == [True, False, True]
    assert layout.sequence_mask().tolist() == [True, True, True]
    with pytest.raises(ShapeError, match=r"facts\['prompt_tokens'\]"):
        layout.with_facts(prompt_tokens=torch.ones(2))
    with pytest.raises(MissingColumnError, match="no 'anything'. Do this."):
        layout.fact("anything", "Do this.")
    again = pickle.loads(pickle.dumps(more))
    assert torch.equal(again.mask, more.mask)
    assert torch.equal(again.sequence_mask(), more.sequence_mask())


@each_layout
def test_prompts_count_tokens_and_sequences(place: int) -> None:
    layout, _ = both()[place]
    layout = layout.with_facts(sequence_mask=torch.tensor([True, True, False]))
    layout = layout.with_prompts(torch.tensor([5, -1, 5]))
    assert layout.facts["prompt_tokens"].tolist() == [4.0, 0.0, 4.0]
    assert layout.facts["prompt_sequences"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ShapeError, match="integers"):
        layout.with_prompts(torch.tensor([0.0, 1.0, 2.0]))


@each_layout
def test_another_mask_keeps_facts(place: int) -> None:
    layout, _ = both()[place]
    layout = layout.with_facts(total_tokens=torch.tensor([9.0, 8.0, 7.0]))
    other = layout.with_mask(torch.zeros_like(layout.mask))
    assert other.local_counts().tolist() == [0.0, 0.0, 0.0]
    assert other.token_counts().tolist() == [9.0, 8.0, 7.0]
    with pytest.raises(ShapeError):
        layout.with_mask(torch.ones(1, 1, dtype=torch.bool))


@each_layout
def test_a_shard_does_not_take_its_tokens_for_the_whole_sequence(place: int) -> None:
    layout, column = both()[place]
    shard = layout.as_shard()
    assert shard.segment_sum(column).tolist() == [5.0, 0.0, 192.0]
    with pytest.raises(MissingColumnError, match="full_token_counts"):
        shard.token_counts()
    assert shard.with_facts(total_tokens=torch.ones(3)).token_counts().tolist() == [1.0] * 3
    assert layout.token_counts().tolist() == [2.0, 0.0, 2.0]


def test_what_no_layout_accepts() -> None:
    good = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        PaddedLayout(good.int())
    with pytest.raises(ShapeError, match=r"\[b, t\]"):
        PaddedLayout(good[0])
    flat = torch.ones(4, dtype=torch.bool)
    for bounds in ([0, 3], [1, 4], [0, 3, 2, 4], [0, 5]):
        with pytest.raises(ShapeError, match="cu_seqlens runs"):
            PackedLayout(torch.tensor(bounds), flat)
    for bounds in (torch.tensor([0.0, 4.0]), torch.tensor([], dtype=torch.long), torch.tensor([[0, 4]])):
        with pytest.raises(ShapeError):
            PackedLayout(bounds, flat)
    with pytest.raises(ShapeError, match="Nothing is broadcast"):
        PaddedLayout(good).segment_sum(torch.ones(2, 1))


def test_layouts_of_nothing() -> None:
    for layout in (
        PaddedLayout(torch.zeros(0, 3, dtype=torch.bool)),
        PackedLayout(torch.tensor([0]), torch.zeros(0, dtype=torch.bool)),
    ):
        assert layout.num_sequences == 0
        assert layout.segment_sum(torch.zeros(layout.shape)).shape == (0,)
        assert layout.with_prompts(torch.zeros(0, dtype=torch.long)).num_sequences == 0
