"""The blocked reverse scan against a plain loop, and what it may cost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import PackedLayout, PaddedLayout, ShapeError
from rlobjectives.layouts import scan
from tests.measure import Cost
from tests.oracles import scan as oracle


def ragged(seed: int, lengths: list[int], dtype: torch.dtype = torch.float64):
    """Packed columns of sequences, and the same padded; NaN under every false mask."""
    rng = torch.Generator().manual_seed(seed)
    total, width = sum(lengths), max(lengths) + 2
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(total, generator=rng) > 0.3
    delta = torch.where(mask, torch.randn(total, generator=rng, dtype=torch.float64), torch.nan).to(dtype)
    decay = torch.rand(total, generator=rng, dtype=torch.float64)
    tail = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
    inside = torch.arange(width).expand(len(lengths), width) < torch.tensor(lengths).unsqueeze(1)
    pad = lambda column, fill: torch.full(inside.shape, fill, dtype=column.dtype).masked_scatter(
        inside, column
    )
    packed = PackedLayout(bounds, mask)
    padded = PaddedLayout(pad(mask, False))
    return packed, padded, (delta, pad(delta, math.nan)), (decay, pad(decay, math.nan)), tail, inside


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 7, 33]), min_size=1, max_size=6),
    rate=st.sampled_from([0.0, 0.01, 0.95, 1.0, None]),
    limit=st.sampled_from([1, 5, 1 << 17]),
)
def test_padded_and_packed_equal_the_loop(seed, lengths, rate, limit):
    packed, padded, delta, decay, tail, inside = ragged(seed, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_CPU_TOKENS", limit)
        flat = packed.reverse_scan(delta[0], decay[0] if rate is None else rate, tail)
        wide = padded.reverse_scan(delta[1], decay[1] if rate is None else rate, tail)
    torch.testing.assert_close(wide[inside], flat, rtol=0, atol=1e-12)
    start = 0
    for row, length in enumerate(lengths):
        part = slice(start, start + length)
        expected = oracle.reverse_scan(
            delta[0][part].tolist(),
            decay[0][part].tolist() if rate is None else rate,
            packed.mask[part].tolist(),
            tail[row].item(),
        )
        torch.testing.assert_close(
            flat[part], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
        )
        summed = oracle.cumulative_sum(delta[0][part].tolist(), packed.mask[part].tolist())
        for found in (packed.cumulative_sum(delta[0])[part], padded.cumulative_sum(delta[1])[row, :length]):
            torch.testing.assert_close(found, torch.tensor(summed, dtype=torch.float64), rtol=0, atol=1e-12)
        start += length


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.5, 0.95, 0.99, 1.0])
def test_long_float32_sequences_are_as_exact_as_float64(rate):
    length = 8192
    delta = torch.randn(2, length)
    layout = PaddedLayout(torch.rand(2, length) > 0.2)
    found = layout.reverse_scan(delta, rate)
    assert found.dtype is torch.float32
    for row in range(2):
        expected = torch.tensor(
            oracle.reverse_scan(delta[row].tolist(), rate, layout.mask[row].tolist()), dtype=torch.float64
        )
        assert float((found[row].double() - expected).abs().max() / expected.abs().max()) < 1e-7


def test_a_decay_power_that_vanishes_in_float32_does_no_harm():
    delta = torch.zeros(1, 32_768)
    delta[0, -1] = 1.0
    found = PaddedLayout(torch.ones(1, 32_768, dtype=torch.bool)).reverse_scan(delta, 0.95)
    assert bool(torch.isfinite(found).all())
    assert float(found[0, -101]) == pytest.approx(0.95**100, rel=1e-6)


def test_nothing_of_one_sequence_reaches_another():
    delta = torch.tensor([1.0, 1.0, 5.0, 7.0])
    layout = PackedLayout(torch.tensor([0, 0, 2, 2, 4, 4]), torch.ones(4, dtype=torch.bool))
    assert layout.reverse_scan(delta, 1.0).tolist() == [2.0, 1.0, 12.0, 7.0]
    tail = torch.tensor([100.0, 10.0, 100.0, 20.0, 100.0])
    assert layout.reverse_scan(delta, 1.0, tail).tolist() == [12.0, 11.0, 32.0, 27.0]


def test_batches_without_tokens():
    assert PackedLayout(torch.tensor([0]), torch.ones(0, dtype=torch.bool)).reverse_scan(
        torch.ones(0), 1.0
    ).shape == (0,)
    empty = PackedLayout(torch.tensor([0, 0]), torch.ones(0, dtype=torch.bool))
    assert empty.reverse_scan(torch.ones(0), 1.0, torch.ones(1)).shape == (0,)
    assert PaddedLayout(torch.ones(2, 0, dtype=torch.bool)).reverse_scan(torch.ones(2, 0), 1.0).shape == (
        2,
        0,
    )
    assert PaddedLayout(torch.ones(0, 3, dtype=torch.bool)).reverse_scan(torch.ones(0, 3), 1.0).shape == (
        0,
        3,
    )


def test_views_of_larger_tensors():
    wide, mask = torch.randn(3, 9, dtype=torch.float64), torch.rand(3, 9) > 0.2
    found = PaddedLayout(mask[:, 1:-1]).reverse_scan(wide[:, 1:-1], 0.9)
    again = PaddedLayout(mask[:, 1:-1].clone()).reverse_scan(wide[:, 1:-1].clone(), 0.9)
    assert torch.equal(found, again)


def test_the_input_is_left_alone_and_no_gradient_comes_out():
    delta = torch.randn(2, 5, requires_grad=True)
    before = delta.detach().clone()
    found = PaddedLayout(torch.ones(2, 5, dtype=torch.bool)).reverse_scan(delta, torch.full((2, 5), 0.5))
    assert not found.requires_grad
    assert torch.equal(delta.detach(), before)


def test_shapes_are_checked():
    layout = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"delta has shape \[2, 4\]"):
        layout.reverse_scan(torch.ones(2, 4), 1.0)
    with pytest.raises(ShapeError, match="decay has shape"):
        layout.reverse_scan(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ShapeError, match="tail has shape"):
        layout.reverse_scan(torch.ones(2, 3), 1.0, torch.ones(3))


def test_a_copy_with_another_mask_keeps_the_facts():
    for layout in (
        PaddedLayout(torch.ones(2, 2, dtype=torch.bool), total_tokens=torch.ones(2)),
        PackedLayout(torch.tensor([0, 1, 4]), torch.ones(4, dtype=torch.bool), total_tokens=torch.ones(2)),
    ):
        other = layout.with_mask(torch.zeros_like(layout.mask))
        assert not other.mask.any()
        assert other.token_counts().tolist() == [1.0, 1.0]


def test_operations_grow_with_the_logarithm_of_the_tokens_only():
    counts = []
    for width in (256, 512, 1024, 2048, 4096):
        layout = PaddedLayout(torch.ones(4, width, dtype=torch.bool))
        with Cost() as cost:
            layout.reverse_scan(torch.zeros(4, width), 0.9)
        counts.append(cost.operations)
    steps = {later - earlier for earlier, later in zip(counts, counts[1:], strict=False)}
    assert len(steps) == 1  # one more halving each time, whatever the length
    assert steps.pop() <= 16
    assert counts[0] < 200


@pytest.mark.parametrize("packed", [False, True])
def test_temporaries_stay_small_whatever_the_batch(packed):
    extra = []
    for rows in (64, 256):
        layout = PaddedLayout(torch.ones(rows, 8192, dtype=torch.bool))
        if packed:
            layout = PackedLayout(torch.arange(rows + 1) * 8192, layout.mask.flatten())
        delta = torch.zeros(layout.shape)
        with Cost() as cost:
            layout.reverse_scan(delta, 0.9)
        extra.append(cost.peak - delta.numel() * delta.element_size())
    assert extra[0] == pytest.approx(extra[1], rel=0.01)
    assert extra[1] < 6 * 2**20
