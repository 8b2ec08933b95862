"""A large micro-batch is worked on in blocks: what that costs, and that nothing tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import (
    GRPO,
    GSPO,
    Capabilities,
    ClippedSurrogate,
    Mean,
    Metric,
    NonFiniteError,
    Objective,
    PackedLayout,
    PaddedLayout,
    PolicyLoss,
    SequenceMean,
    TokenBatch,
    TokenLayout,
    TokenLoss,
    TokenMean,
)
from tests.measure import Cost

MEBI = 2**20
WIDTH = 8192  # sixteen sequences a block


def batch(objective: Objective, count: int, packed: bool = False) -> tuple[Any, TokenBatch]:
    rng = torch.Generator().manual_seed(count)
    layout: TokenLayout
    mask = torch.rand(count, WIDTH, generator=rng) > 0.1
    shape = mask.shape
    if packed:
        bounds = torch.arange(0, count * WIDTH + 1, WIDTH)
        layout, shape = PackedLayout(bounds, mask.flatten()), mask.flatten().shape
    else:
        layout = PaddedLayout(mask)
    advantages = torch.randn(count, generator=rng)
    window = objective.freeze([(advantages, layout)])
    columns = {name: -torch.rand(shape, generator=rng) for name in ("logprobs", "old_logprobs")}
    columns["logprobs"].requires_grad_()
    return window, TokenBatch(
        layout=layout, advantages=window.advantages(advantages, layout).float(), **columns
    )


CLIPPED = Objective(estimator=GRPO(), policy_loss=ClippedSurrogate(clip_high=0.28), reduction=TokenMean())
SEQUENCES = Objective(estimator=GRPO(), policy_loss=GSPO(), reduction=SequenceMean())


@pytest.mark.parametrize("objective", [CLIPPED, SEQUENCES], ids=["tokens", "sequences"])
@pytest.mark.parametrize("packed", [False, True])
def test_memory_beside_the_gradient_does_not_grow_with_the_micro_batch(
    objective: Objective, packed: bool
) -> None:
    beside = []
    for count in (32, 128):
        window, tokens = batch(objective, count, packed)
        with Cost() as cost:
            window.loss(tokens)
        beside.append(cost.peak - tokens.logprobs.numel() * 4)
    assert beside[1] <= beside[0] + MEBI / 4
    assert beside[1] <= 14 * MEBI


def test_operations_are_few_and_grow_with_the_blocks_alone() -> None:
    found = {}
    for count in (1, 16, 32, 48):
        window, tokens = batch(CLIPPED, count)
        with Cost() as cost:
            window.loss(tokens)
        found[count] = cost.operations
    assert found[1] == found[16]
    assert found[48] - found[32] <= 420
    assert found[16] <= 420


@pytest.mark.parametrize("packed", [False, True])
def test_faults_of_all_blocks_are_counted(packed: bool) -> None:
    window, tokens = batch(CLIPPED, 48, packed)
    broken = tokens.logprobs.detach().clone()
    places = tokens.layout.mask.nonzero()[[5, -5, -4]]
    broken[tuple(places.T)] = torch.nan
    counted = int(tokens.layout.mask.sum())
    with pytest.raises(NonFiniteError, match=f"logprobs has 3 non-finite values among {counted:,} "):
        window.summarize([window.loss(tokens.replace(logprobs=broken))])


def test_blocks_tile_a_layout_with_empty_sequences_anywhere() -> None:
    bounds = torch.tensor([0, 0, 3, 3, 3, 4, 9, 9], dtype=torch.int32)
    mask = torch.tensor([True, False, True, True, True, False, True, True, True])
    layout = PackedLayout(bounds, mask, sequence_mask=torch.arange(7) % 2 == 0)
    column = torch.arange(9.0)
    found = list(layout.blocks(4))
    # One longer than the limit stands alone; the empty one behind it is not lost.
    assert found == [(slice(0, 5), slice(0, 4)), (slice(5, 6), slice(4, 9)), (slice(6, 7), slice(9, 9))]
    for sequences, places in found:
        part, whole = layout.block(sequences, places), layout.rows(torch.arange(7)[sequences])
        assert part.cu_seqlens.tolist() == whole.cu_seqlens.tolist()
        assert part.cu_seqlens.dtype == torch.int32
        assert (part.width, part.shortest, part.num_sequences) == (
            whole.width,
            whole.shortest,
            whole.num_sequences,
        )
        assert torch.equal(part.segment_sum(column[places]), layout.segment_sum(column)[sequences])
        assert torch.equal(part.expand(torch.arange(7)[sequences]), layout.expand(torch.arange(7))[places])
        assert torch.equal(part.sequence_mask(), layout.sequence_mask()[sequences])
        assert part.mask.data_ptr() == layout.mask[places].data_ptr(), "the mask was copied"
    assert list(PackedLayout(torch.tensor([0]), mask[:0]).blocks()) == []


def test_a_block_keeps_to_its_place_in_a_context_parallel_group() -> None:
    layout = PaddedLayout(torch.ones(4, 2, dtype=torch.bool), total_tokens=torch.arange(4)).as_shard()
    part = layout.block(slice(1, 3), slice(1, 3))
    assert part.is_shard
    assert part.token_counts().tolist() == [1.0, 2.0]


class Counting(PolicyLoss):
    """Says how many sequences it sees at once."""

    metrics = {"policy/seen": Metric(Mean, "sequences", "sequences at once")}

    def value_and_slope(self, tokens: TokenBatch, context: Any) -> TokenLoss:
        del context
        nothing: Tensor = torch.zeros_like(tokens.logprobs)
        seen = Mean.of(torch.tensor([float(tokens.num_sequences)]))
        return TokenLoss(nothing, nothing, {"policy/seen": seen})


class Whole(Counting):
    capabilities = Capabilities(depends_on_cut=True)


@pytest.mark.parametrize(("part", "seen"), [(Counting(), 16.0), (Whole(), 48.0)])
def test_a_part_that_depends_on_the_cut_sees_its_micro_batch_whole(part: PolicyLoss, seen: float) -> None:
    window, tokens = batch(Objective(estimator=GRPO(), policy_loss=part), 48)
    report = window.summarize([window.loss(tokens)])
    assert report["policy/seen"] == seen


def test_without_gradient_there_is_no_gradient_to_hold() -> None:
    window, tokens = batch(CLIPPED, 32)
    with torch.no_grad(), Cost() as cost:
        output = window.loss(tokens)
    assert not output.loss.requires_grad
    assert cost.peak <= 12 * MEBI
