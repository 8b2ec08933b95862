"""Packed batches: sequences end to end in one dimension, without padding between them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from rlobjectives.checks import check_device, check_integral, check_shape, check_tensor
from rlobjectives.errors import ShapeError
from rlobjectives.layouts.base import TokenLayout
from rlobjectives.layouts.scan import Buffers, Piece, piece_limit

__all__ = ["PackedLayout"]


class PackedLayout(TokenLayout):
    """Sequences laid end to end; sequence ``i`` is ``[cu_seqlens[i], cu_seqlens[i + 1])``.

    Args:
        cu_seqlens: Integers ``[n + 1]`` of any width, which `rows` keeps; starts at 0, never falls, ends at ``l``. Empty sequences
            (two equal entries) are welcome. On the device of `mask`, or on the CPU, where reading them waits for nothing;
            they are moved to the mask's device once.
        mask: Bool ``[l]``, True where the token counts.
        facts: Per-sequence columns ``[n]`` (see `TokenLayout`).

    Raises:
        ShapeError: If the boundaries do not tile the tokens, or lie on another accelerator than `mask`. The boundaries are
            read once, here.

    Example:
        >>> layout = PackedLayout(torch.tensor([0, 2, 3]), torch.tensor([True, True, True]))
        >>> layout.segment_sum(torch.tensor([1.0, 2.0, 4.0])).tolist()
        [3.0, 4.0]
    """

    def __init__(self, cu_seqlens: Tensor, mask: Tensor, **facts: Tensor) -> None:
        check_integral("cu_seqlens", cu_seqlens)
        check_tensor("mask", mask)
        # Boundaries that are on the host already cost no wait for the device, and nothing but data can be read.
        if "cpu" not in (cu_seqlens.device.type, mask.device.type) or cu_seqlens.is_meta:
            check_device("cu_seqlens", cu_seqlens, mask.device, "layout.mask")
        if cu_seqlens.dim() != 1 or mask.dim() != 1 or cu_seqlens.numel() < 1:
            raise ShapeError(
                f"cu_seqlens has shape {list(cu_seqlens.shape)} and mask {list(mask.shape)}; "
                "a packed layout needs [n + 1] and [l]."
            )
        bounds = cu_seqlens.tolist()
        lengths = [later - earlier for earlier, later in itertools.pairwise(bounds)]
        falls = min(lengths, default=0) < 0
        if bounds[0] != 0 or bounds[-1] != mask.numel() or falls:
            raise ShapeError(
                f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}{' and falls on the way' if falls else ''}; "
                f"expected boundaries that start at 0, never fall and end at {mask.numel()} (the tokens)."
            )
        self.cu_seqlens = cu_seqlens.to(mask.device)
        self._bounds: list[int] = bounds
        self._width, self._shortest = max(lengths, default=0), min(lengths, default=0)
        self._set(mask, facts)
        self._check_facts()
        self.index = torch.repeat_interleave(
            torch.arange(len(lengths), device=mask.device),
            self.cu_seqlens.long().diff(),
            output_size=mask.numel(),
        )

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens.numel() - 1

    @property
    def width(self) -> int:
        """Length of the longest sequence."""
        return self._width

    @property
    def shortest(self) -> int:
        """Length of the shortest sequence."""
        return self._shortest

    def first(self, per_token: Tensor) -> Tensor:
        """Where each sequence starts."""
        self.check_columns("per_token", per_token)
        if self._bounds[-1] == 0:
            return per_token.new_zeros(self.num_sequences, *per_token.shape[1:])
        return per_token[self.cu_seqlens[:-1].clamp_max(self._bounds[-1] - 1)]

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Gather each token's sequence number."""
        check_shape("per_sequence", per_sequence, (self.num_sequences,), "one entry per sequence")
        return per_sequence[self.index]

    def segment_sum(self, per_token: Tensor) -> Tensor:
        """Add each counted token to its sequence."""
        self.check("per_token", per_token)
        chosen = self.select(per_token)
        if not (chosen.is_floating_point() or chosen.is_complex()):
            chosen = chosen.long()
        return chosen.new_zeros(self.num_sequences).index_add(0, self.index, chosen)

    def cumulative_sum(self, per_token: Tensor) -> Tensor:
        """Add along the pack, less what stood before each sequence."""
        self.check("per_token", per_token)
        running = self.select(per_token.detach()).cumsum(0, dtype=torch.float64)
        before = torch.cat([running.new_zeros(1), running])[self.cu_seqlens[:-1]]
        return running - before[self.index]

    def blocks(self, limit: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Runs of sequences; each is found by bisection, not by walking over them."""
        bounds, limit, first = self._bounds, limit or piece_limit(self.device), 0
        while first < self.num_sequences:
            start = bounds[first]
            stop = max(first + 1, bisect_right(bounds, start + limit, first) - 1)
            yield slice(first, stop), slice(start, bounds[stop])
            first = stop

    def block(self, sequences: slice, tokens: slice) -> PackedLayout:
        """Some neighbouring sequences, counted from 0; nothing is read from the device."""
        part = super().block(sequences, tokens)
        part.cu_seqlens = self.cu_seqlens[sequences.start : sequences.stop + 1] - tokens.start
        part._bounds = [bound - tokens.start for bound in self._bounds[sequences.start : sequences.stop + 1]]
        lengths = [later - earlier for earlier, later in itertools.pairwise(part._bounds)]
        part._width, part._shortest = max(lengths, default=0), min(lengths, default=0)
        part.index = self.index[tokens] - sequences.start
        return part

    def pieces(self, limit: int | None = None) -> Iterator[Piece]:
        """Runs of sequences with at least one position."""
        lengths, buffers = self.cu_seqlens.diff(), Buffers(self.device)
        for sequences, span in self.blocks(limit):
            if size := span.stop - span.start:
                yield Piece(span, sequences, lengths[sequences], size, buffers)

    def rows(self, index: Tensor | slice) -> PackedLayout:
        """The chosen sequences, repacked in the order given."""
        chosen = self._chosen(index)
        lengths = self.cu_seqlens.diff()[chosen]
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
        facts = {name: fact[index] for name, fact in self.facts.items()}
        return PackedLayout(bounds, self.mask[self._positions(chosen)], **facts)

    def rows_of(self, per_token: Tensor, index: Tensor | slice) -> Tensor:
        """The tokens of the chosen sequences, repacked in the order given."""
        self.check_columns("per_token", per_token)
        return per_token[self._positions(self._chosen(index))]

    def _chosen(self, index: Tensor | slice) -> Tensor:
        return torch.arange(self.num_sequences, device=self.device)[index]

    def _positions(self, chosen: Tensor) -> Tensor:
        starts, lengths = (
            self.cu_seqlens[:-1],
            self.cu_seqlens.diff(),
        )
        counts = lengths[chosen]
        within = torch.arange(int(counts.sum()), device=self.device)
        within -= torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return torch.repeat_interleave(starts[chosen], counts) + within

    def __repr__(self) -> str:
        return f"PackedLayout(n={self.num_sequences}, l={self.mask.numel()})"
