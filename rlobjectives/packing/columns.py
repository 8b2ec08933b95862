"""Laying token columns end to end, and back, without losing or mixing a token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_integral, check_tensor
from rlobjectives.errors import ShapeError
from rlobjectives.layouts import PackedLayout, PaddedLayout

__all__ = ["Packing"]


class Packing:
    """How the real tokens of some padded rows are laid end to end.

    Args:
        attention_mask: Bool or 0/1 ``[b, t]``: the tokens that exist, wherever the padding is (left, right or
            both). Not the loss mask.
        rows: Positions of the rows to pack, in this order, each once; all by default.

    Raises:
        ShapeError: If the mask is no matrix, a row has padding between its tokens, or ``rows`` are not different
            positions of rows.

    Example:
        >>> packing = Packing(torch.tensor([[1, 1, 0], [1, 1, 1]]))
        >>> packed = packing.pack(torch.tensor([[5, 6, 0], [7, 8, 9]]))
        >>> packed.tolist(), packing.position_ids.tolist(), packing.cu_seqlens.tolist()
        ([5, 6, 7, 8, 9], [0, 1, 0, 1, 2], [0, 2, 5])
        >>> packing.unpack(packed).tolist()
        [[5, 6, 0], [7, 8, 9]]
    """

    def __init__(self, attention_mask: Tensor, rows: Tensor | tuple[int, ...] | None = None) -> None:
        check_tensor("attention_mask", attention_mask)
        if attention_mask.dim() != 2:
            raise ShapeError(f"attention_mask has shape {list(attention_mask.shape)}; expected [b, t].")
        exists = attention_mask.bool()
        changes = exists[:, 1:] != exists[:, :-1]
        starts = changes.sum(1) + exists[:, :1].sum(1)
        if bool((starts > 2).any()):
            raise ShapeError(
                f"attention_mask has padding between tokens in {int((starts > 2).sum())} rows; a sequence must be "
                "one stretch. (Tokens without loss belong into the loss mask, not here.)"
            )
        self.shape = tuple(exists.shape)
        self.rows = _positions(rows, exists)
        chosen = exists[self.rows]
        row, column = chosen.nonzero(as_tuple=True)
        lengths = chosen.sum(1)
        self._places = (self.rows[row], column)
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        """Boundaries of the sequences in the packed dimension, ``[n + 1]``: int32, as attention kernels take them."""
        self.position_ids = torch.arange(row.numel(), device=exists.device) - self.cu_seqlens[row]
        """Position of each token in its own sequence, ``[l]``."""

    def pack(self, column: Tensor) -> Tensor:
        """The real tokens of a column ``[b, t, …]``, end to end: ``[l, …]``. Differentiable."""
        check_tensor("column", column)
        if tuple(column.shape[:2]) != self.shape:
            raise ShapeError(
                f"column has shape {list(column.shape)}; expected {[*self.shape]} first, as attention_mask."
            )
        return column[self._places]

    def unpack(self, packed: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of `pack`: ``[b, t, …]``, with ``fill`` at padding and rows left out. Differentiable."""
        if packed.shape[:1] != self.position_ids.shape:
            raise ShapeError(
                f"packed has shape {list(packed.shape)}; expected {self.position_ids.numel()} tokens first."
            )
        base = packed.new_full((*self.shape, *packed.shape[1:]), fill)
        return base.index_put(self._places, packed)

    def layout(self, padded: PaddedLayout) -> PackedLayout:
        """The packed layout of the same sequences: their loss mask and facts, packed.

        Raises:
            ShapeError: If the loss mask marks a token that does not exist.
        """
        mask = self.pack(padded.mask)
        if int(mask.sum()) != int(padded.mask[self.rows].sum()):
            raise ShapeError("The loss mask counts tokens where attention_mask has padding. Clear it there.")
        facts = {name: fact[self.rows] for name, fact in padded.facts.items()}
        return PackedLayout(self.cu_seqlens, mask, **facts)


def _positions(rows: Tensor | tuple[int, ...] | None, exists: Tensor) -> Tensor:
    """Positions of rows, each of them once: of one packed twice, `unpack` would have to drop a copy."""
    count = exists.shape[0]
    if rows is None:
        return torch.arange(count, device=exists.device)
    chosen = torch.as_tensor(rows, device=exists.device)
    if chosen.numel():
        check_integral(
            "rows", chosen, meaning="the positions of rows (of flags, `flags.nonzero().flatten()`)"
        )
    chosen = chosen.long()
    found = chosen.tolist()
    if chosen.dim() != 1 or len(set(found)) != len(found) or not set(found) <= set(range(count)):
        raise ShapeError(
            f"rows is {found}; expected different positions from 0 to {count - 1} in one dimension."
        )
    return chosen
