"""The reverse linear scan: one recurrence behind every return and trace, without a loop over tokens.

    yₜ = xₜ + dₜ · yₜ₊₁

Pairs of neighbours are folded into one, the half-size problem is solved the same way, and the halves
are put back: about 5·log₂(tokens) operations on whole vectors, linear work, and only sums and products of what
is there. No power is ever divided by, so nothing underflows into an error: a decay product that vanishes
is a contribution that vanishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Buffers", "Piece", "linear_scan_", "piece_limit", "reverse_scan"]

_CPU_TOKENS = 1 << 17
_DEVICE_TOKENS = 1 << 21


def piece_limit(device: torch.device) -> int:
    """How many tokens to work on at once: what stays in a CPU's cache, or fills an accelerator."""
    return _CPU_TOKENS if device.type == "cpu" else _DEVICE_TOKENS


def linear_scan_(x: Tensor, decay: Tensor, space: Tensor | None = None) -> None:
    """Solve ``yₜ = xₜ + dₜ·yₜ₊₁`` in place, with ``y`` = 0 beyond the end.

    Args:
        x: ``[l]``, any stride; overwritten by ``y``.
        decay: ``[l]``. A 0 keeps what follows from coming through.
        space: ``[2·l]`` of scratch memory of the same dtype; allocated when missing.

    Example:
        >>> x = torch.tensor([1.0, 1.0, 1.0])
        >>> linear_scan_(x, torch.full((3,), 0.5))
        >>> x
        tensor([1.7500, 1.5000, 1.0000])
    """
    size = x.numel()
    if size < 2:
        return
    if space is None:
        space = x.new_empty(2 * size)
    odd, half = size % 2, size // 2  # pairs are formed from the end: the first element may be left over
    left, right = x[odd::2], x[odd + 1 :: 2]
    left_decay, right_decay = decay[odd::2], decay[odd + 1 :: 2]
    solved, product = space[:half], space[half : 2 * half]
    torch.addcmul(left, left_decay, right, out=solved)
    torch.mul(left_decay, right_decay, out=product)
    linear_scan_(solved, product, space[2 * half :])
    left.copy_(solved)
    right[:-1].addcmul_(right_decay[:-1], solved[1:])
    if odd:
        x[:1].addcmul_(decay[:1], x[1:2])


class Buffers:
    """Scratch memory that the pieces of one computation share: fresh pages cost more than the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[str, Tensor] = {}

    def get(self, name: str, size: int) -> Tensor:
        """Float64 ``[size]`` with whatever it held before."""
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = torch.empty(size, dtype=torch.float64, device=self.device)
        return held[:size]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring whole sequences of a layout, to be worked on at once in float64.

    Attributes:
        span: Where they lie along the first dimension of a token tensor.
        sequences: Which sequences they are.
        lengths: Positions of each, counted or not, int64 ``[k]``.
        size: Positions together.
        buffers: Scratch memory, shared with the pieces that come after.
        last: Last position of each sequence. An empty one points at the end of its neighbour, where it only
            ever adds zero.
    """

    span: slice
    sequences: slice
    lengths: Tensor
    size: int
    buffers: Buffers
    last: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last", (self.lengths.cumsum(0) - 1) % self.size)

    def take(self, per_token: Tensor) -> Tensor:
        """The positions of the piece in one dimension (a view where the memory allows)."""
        return per_token[self.span].reshape(-1)

    def load(self, name: str, per_token: Tensor, beside: Tensor) -> Tensor:
        """The positions of a token tensor in a buffer, 0 where ``beside`` (never a product)."""
        return self.buffers.get(name, self.size).copy_(self.take(per_token)).masked_fill_(beside, 0.0)

    def put(self, target: Tensor, flat: Tensor) -> None:
        """Write the positions of the piece back."""
        place = target[self.span]
        place.copy_(flat.view(place.shape))

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Each position's number of its sequence, from ``[n]``."""
        return torch.repeat_interleave(per_sequence[self.sequences], self.lengths, output_size=self.size)

    def following(self, name: str, flat: Tensor, tail: Tensor | None) -> Tensor:
        """What stands one position later in the same sequence; ``tail`` (or 0) after its last."""
        shifted = self.buffers.get(name, self.size)
        shifted[:-1].copy_(flat[1:])
        shifted.index_fill_(0, self.last, 0.0)
        return shifted if tail is None else shifted.index_add_(0, self.last, self._tails(tail))

    def scan_(self, x: Tensor, decay: float | Tensor, beside: Tensor, tail: Tensor | None) -> Tensor:
        """``yₜ = xₜ + d·yₜ₊₁`` within each sequence, in place, where a position ``beside`` has d = 1.

        Args:
            x: Float64 ``[size]``; overwritten and returned.
            decay: d, one number or ``[size]``.
            beside: Bool ``[size]``.
            tail: y after the last position of each sequence of the *layout*, ``[n]``; 0 by default.
        """
        step = self.buffers.get("step", self.size)
        step = step.copy_(decay) if isinstance(decay, Tensor) else step.fill_(decay)
        step.masked_fill_(beside, 1.0)
        if tail is not None:
            x.index_add_(0, self.last, self._tails(tail) * step[self.last])
        step.index_fill_(0, self.last, 0.0)  # nothing crosses from one sequence into the one before
        linear_scan_(x, step, self.buffers.get("space", 2 * self.size))
        return x

    def _tails(self, tail: Tensor) -> Tensor:
        return torch.where(self.lengths > 0, tail[self.sequences].to(torch.float64), 0.0)


def reverse_scan(
    delta: Tensor, decay: float | Tensor, mask: Tensor, pieces: Iterator[Piece], tail: Tensor | None
) -> Tensor:
    """`TokenLayout.reverse_scan`, piece by piece, in float64 inside and in ``delta``'s dtype outside."""
    result = torch.empty_like(delta, memory_format=torch.contiguous_format)
    for piece in pieces:
        beside = ~piece.take(mask)
        rate = piece.take(decay) if isinstance(decay, Tensor) else decay
        piece.put(result, piece.scan_(piece.load("x", delta, beside), rate, beside, tail))
    return result
