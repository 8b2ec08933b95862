"""Rectangular batches: one row per sequence, padded to a common width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlobjectives.checks import check_shape, check_tensor
from rlobjectives.errors import ShapeError
from rlobjectives.layouts.base import TokenLayout
from rlobjectives.layouts.scan import Buffers, Piece, piece_limit

__all__ = ["PaddedLayout"]


class PaddedLayout(TokenLayout):
    """Sequences as rows of a ``[b, t]`` rectangle; the mask may have holes anywhere.

    Args:
        mask: Bool ``[b, t]``, True where the token counts.
        facts: Per-sequence columns ``[b]`` (see `TokenLayout`).

    Raises:
        ShapeError: If the mask is not a boolean matrix, or a fact has another length.

    Example:
        >>> layout = PaddedLayout(torch.tensor([[True, True], [True, False]]))
        >>> layout.token_counts().tolist(), layout.expand(torch.tensor([5.0, 7.0])).tolist()
        ([2.0, 1.0], [[5.0, 5.0], [7.0, 7.0]])
    """

    def __init__(self, mask: Tensor, **facts: Tensor) -> None:
        check_tensor("mask", mask)
        if mask.dim() != 2:
            raise ShapeError(
                f"layout.mask has shape {list(mask.shape)}; a padded layout needs [b, t]. "
                "For packed tokens use PackedLayout(cu_seqlens=..., mask=...)."
            )
        self._set(mask, facts)
        self._check_facts()

    @property
    def num_sequences(self) -> int:
        """Number of rows."""
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        """Columns."""
        return self.mask.shape[1]

    @property
    def shortest(self) -> int:
        """Columns, for all rows are as long."""
        return self.mask.shape[1]

    def first(self, per_token: Tensor) -> Tensor:
        """The first column."""
        self.check_columns("per_token", per_token)
        if self.width == 0:
            return per_token.new_zeros(self.num_sequences, *per_token.shape[2:])
        return per_token[:, 0]

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Repeat each row's number along the row (a view, no memory)."""
        check_shape("per_sequence", per_sequence, (self.num_sequences,), "one entry per sequence")
        return per_sequence.unsqueeze(1).expand(self.shape)

    def segment_sum(self, per_token: Tensor) -> Tensor:
        """Sum each row over its counted tokens."""
        self.check("per_token", per_token)
        return self.select(per_token).sum(1)

    def cumulative_sum(self, per_token: Tensor) -> Tensor:
        """Add along each row."""
        self.check("per_token", per_token)
        return self.select(per_token.detach()).cumsum(1, dtype=torch.float64)

    def blocks(self, limit: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Runs of rows."""
        count, width = self.mask.shape
        step = max(1, (limit or piece_limit(self.device)) // max(1, width))
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            yield rows, rows

    def pieces(self, limit: int | None = None) -> Iterator[Piece]:
        """Runs of rows."""
        width, buffers = self.width, Buffers(self.device)
        for rows, _ in self.blocks(limit) if width else ():
            lengths = torch.full((rows.stop - rows.start,), width, dtype=torch.int64, device=self.device)
            yield Piece(rows, rows, lengths, lengths.numel() * width, buffers)

    def rows(self, index: Tensor | slice) -> PaddedLayout:
        """The chosen rows."""
        facts = {name: fact[index] for name, fact in self.facts.items()}
        return PaddedLayout(self.mask[index], **facts)

    def rows_of(self, per_token: Tensor, index: Tensor | slice) -> Tensor:
        """The chosen rows of a token tensor."""
        self.check_columns("per_token", per_token)
        return per_token[index]

    def __repr__(self) -> str:
        return f"PaddedLayout(b={self.mask.shape[0]}, t={self.mask.shape[1]})"
