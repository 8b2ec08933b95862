"""The reverse linear scan: one recurrence behind every return and trace, without a loop over tokens.

    yₜ = xₜ + dₜ · yₜ₊₁

Pairs of neighbours are folded into one, the half-size problem is solved the same way, and the halves
are put back: about 5·log₂(tokens) operations on whole vectors, linear work, and only sums and products of what
is there. No power is ever divided by, so nothing underflows into an error: a decay product that vanishes
is a contribution that vanishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Piece", "linear_scan_", "piece_limit"]

_CPU_TOKENS = 1 << 17
_DEVICE_TOKENS = 1 << 21


def piece_limit(device: torch.device) -> int:
    """How many tokens to work on at once: what stays in a CPU's cache, or fills an accelerator."""
    return _CPU_TOKENS if device.type == "cpu" else _DEVICE_TOKENS


def linear_scan_(x: Tensor, decay: Tensor) -> None:
    """Solve ``yₜ = xₜ + dₜ·yₜ₊₁`` in place, with ``y`` = 0 beyond the end.

    Args:
        x: ``[l]``, any stride; overwritten by ``y``.
        decay: ``[l]``; used up. A 0 keeps what follows from coming through.

    Example:
        >>> x = torch.tensor([1.0, 1.0, 1.0])
        >>> linear_scan_(x, torch.full((3,), 0.5))
        >>> x
        tensor([1.7500, 1.5000, 1.0000])
    """
    size = x.numel()
    if size < 2:
        return
    odd = size % 2  # pairs are formed from the end, so that the first element may be left over
    left, right = x[odd::2], x[odd + 1 :: 2]
    left_decay, right_decay = decay[odd::2], decay[odd + 1 :: 2]
    solved = torch.addcmul(left, left_decay, right)
    linear_scan_(solved, left_decay * right_decay)
    left.copy_(solved)
    right[:-1].addcmul_(right_decay[:-1], solved[1:])
    if odd:
        x[:1].addcmul_(decay[:1], x[1:2])


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring whole sequences of a layout, to be worked on at once.

    Attributes:
        span: Where they lie along the first dimension of a token tensor.
        sequences: Which sequences they are.
        lengths: Positions of each, counted or not, int64 ``[k]``.
        size: Positions together.
    """

    span: slice
    sequences: slice
    lengths: Tensor
    size: int

    def take(self, per_token: Tensor) -> Tensor:
        """The positions of the piece in one dimension (a view where the memory allows)."""
        return per_token[self.span].reshape(-1)

    def put(self, target: Tensor, flat: Tensor) -> None:
        """Write the positions of the piece back."""
        place = target[self.span]
        place.copy_(flat.view(place.shape))

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Each position's number of its sequence, from ``[n]``."""
        return torch.repeat_interleave(per_sequence[self.sequences], self.lengths, output_size=self.size)

    def following(self, flat: Tensor, tail: Tensor | None) -> Tensor:
        """What stands one position later in the same sequence; ``tail`` (or 0) after its last."""
        shifted = torch.empty_like(flat)
        shifted[:-1] = flat[1:]
        shifted[self._last()] = 0.0
        return shifted if tail is None else shifted.index_add_(0, self._last(), self._tails(tail, flat))

    def scan(self, x: Tensor, decay: Tensor, tail: Tensor | None) -> Tensor:
        """`linear_scan_` within each sequence, starting from ``tail`` (or 0) after its last position.

        Args:
            x: ``[size]``; overwritten and returned.
            decay: ``[size]``; used up.
            tail: One number a sequence of the *layout*, ``[n]``.
        """
        last = self._last()
        if tail is not None:
            x.index_add_(0, last, self._tails(tail, x) * decay[last])
        decay[last] = 0.0  # nothing crosses from one sequence into the one before
        linear_scan_(x, decay)
        return x

    def _last(self) -> Tensor:
        # An empty sequence points at the end of its neighbour, where it only ever adds zero.
        return (self.lengths.cumsum(0) - 1) % self.size

    def _tails(self, tail: Tensor, like: Tensor) -> Tensor:
        return torch.where(self.lengths > 0, tail[self.sequences].to(like), 0.0)


def decays(mask: Tensor, decay: float | Tensor) -> Tensor:
    """``decay`` at counted positions and 1 elsewhere, float64: a masked token is no step."""
    if isinstance(decay, Tensor):
        return torch.where(mask, decay.to(torch.float64), 1.0)
    counted = mask.to(torch.float64)
    return torch.add(1.0 - counted, counted, alpha=decay)  # exact, and faster than a select


def reverse_scan(
    delta: Tensor, decay: float | Tensor, mask: Tensor, pieces: Iterator[Piece], tail: Tensor | None
) -> Tensor:
    """`TokenLayout.reverse_scan`, piece by piece, in float64 inside and in ``delta``'s dtype outside."""
    result = torch.empty_like(delta, memory_format=torch.contiguous_format)
    for piece in pieces:
        counted = piece.take(mask)
        step = decays(counted, piece.take(decay) if isinstance(decay, Tensor) else decay)
        x = torch.where(counted, piece.take(delta).to(torch.float64), 0.0)
        piece.put(result, piece.scan(x, step, tail))
    return result
