"""Log-probabilities and entropy from hidden states and the head's weight; the logits never exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlobjectives.checks import check_positive_int
from rlobjectives.errors import ShapeError
from rlobjectives.logprobs.inputs import (
    check_inputs,
    compute_dtype,
    counted_rows,
    rows_with_gradient,
)

__all__ = ["hidden_logprobs"]

_LOWEST = -1000.0
_ROWS = 512
_SCRATCH_BYTES = 14 * 2**20  # leaves room for the per-row statistics below 16 MiB


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    scratch_bytes: int = _SCRATCH_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token under ``softmax(hidden · weightᵀ / T)``, without the logits.

    Rows are taken in chunks and the vocabulary in tiles, with an online softmax; the backward computes
    the tiles again (two more matrix products) instead of saving them. Scratch memory is constant in the
    number of tokens and in the vocabulary. Rows into which no gradient flows are dropped before that.
    Sums are in float32 for every weight narrower than that.

    Args:
        hidden: Last hidden states ``[*tokens, h]``.
        weight: The head's weight ``[v, h]``, same dtype as `hidden`. If it needs no gradient, that
            matrix product is left out.
        ids: Token ids ``[*tokens]``.
        temperature: T > 0 of the sampler; dimensionless.
        mask: Bool ``[*tokens]``, True where the token counts. None: everywhere.
        entropy: Whether to compute the entropy as well.
        scratch_bytes: Working memory beyond the result and the gradients. Raise it on a GPU, where
            larger tiles are faster.

    Returns:
        Log-probabilities and entropies (or None) in nats, ``[*tokens]``, float32 (float64 for float64
        input), 0 where the mask is false. Gradient flows once to `hidden` and `weight`.

    Raises:
        ShapeError: If shapes or dtypes do not fit.
        CapabilityError: If the temperature is not positive.

    Example:
        >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
        >>> found, _ = hidden_logprobs(hidden[:1], weight, torch.tensor([0]), temperature=0.6)
        >>> round(found.item(), 6)
        -0.202573
    """
    check_inputs("hidden", hidden, ids, mask, temperature)
    check_positive_int("scratch_bytes", scratch_bytes)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise ShapeError(
            f"weight is {weight.dtype} {list(weight.shape)}; expected {hidden.dtype} [v, "
            f"{hidden.shape[-1]}], the head's weight in the dtype of hidden. Under a sharding strategy "
            "gather it first."
        )
    logprobs, entropies = _FromHidden.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids, mask, float(temperature), entropy, scratch_bytes
    )
    return logprobs, entropies if entropy else None


class _Tiles:
    """Buffers of one call and the product of a row chunk with a vocabulary tile in them."""

    def __init__(self, like: Tensor, vocabulary: int, scratch: int, *, second: bool) -> None:
        self.dtype = compute_dtype(like.dtype)
        self.narrow = like.dtype != self.dtype
        width = like.shape[-1]
        cell = self.dtype.itemsize * (2 if second else 1) + (like.element_size() if self.narrow else 0)
        # A narrow weight's gradient tile is summed in float32, and a product of it needs narrow factors.
        column = width * (self.dtype.itemsize + like.element_size()) if self.narrow else 0
        self.rows = _ROWS
        products = self.rows * width * like.element_size() if self.narrow else 0
        tile = (scratch - products) // (self.rows * cell + column)
        self.tile = min(vocabulary, max(64, tile // 64 * 64))
        size = self.rows * self.tile
        self._z = torch.empty(size, dtype=self.dtype, device=like.device)
        self._other = torch.empty(size if second else 0, dtype=self.dtype, device=like.device)
        self._product = torch.empty(size if self.narrow else 0, dtype=like.dtype, device=like.device)

    def logits(self, hidden: Tensor, tile: Tensor, temperature: float) -> Tensor:
        """``hidden · tileᵀ / T`` in the first buffer, ``[rows, tile]``."""
        shape = (hidden.shape[0], tile.shape[0])
        z = self._shaped(self._z, shape)
        target = self._shaped(self._product, shape) if self.narrow else z
        torch.mm(hidden, tile.T, out=target)
        if self.narrow:
            z.copy_(target)
        return z if temperature == 1.0 else z.div_(temperature)

    def other(self, z: Tensor) -> Tensor:
        """The second buffer, shaped like the first."""
        return self._shaped(self._other, (z.shape[0], z.shape[1]))

    def as_input(self, z: Tensor) -> Tensor:
        """A tile in the dtype of the weight, as a factor of the next product."""
        if not self.narrow:
            return z
        return self._shaped(self._product, (z.shape[0], z.shape[1])).copy_(z)

    @staticmethod
    def _shaped(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
        return buffer[: shape[0] * shape[1]].view(shape)


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        mask: Tensor | None,
        temperature: float,
        entropy: bool,
        scratch: int,
    ) -> tuple[Tensor, Tensor]:
        states, flat_ids = hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1)
        rows, count = counted_rows(mask), ids.numel()
        tiles = _Tiles(hidden, weight.shape[0], scratch, second=entropy)
        logprobs = torch.zeros(count, dtype=tiles.dtype, device=hidden.device)
        lse = torch.zeros_like(logprobs)
        entropies = torch.zeros(count if entropy else 0, dtype=tiles.dtype, device=hidden.device)
        for start in range(0, count if rows is None else rows.numel(), tiles.rows):
            end = start + tiles.rows
            chunk = slice(start, end) if rows is None else rows[start:end]
            found = _online_softmax(tiles, states[chunk], weight, flat_ids[chunk], temperature, entropy)
            logprobs[chunk], lse[chunk], spread = found
            if entropy:
                entropies[chunk] = spread
        ctx.save_for_backward(hidden, weight, ids, mask, lse, entropies)
        ctx.temperature, ctx.entropy, ctx.scratch = temperature, entropy, scratch
        ctx.set_materialize_grads(False)
        return logprobs.view(ids.shape), entropies.view(ids.shape) if entropy else entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, ids, mask, lse, entropies = ctx.saved_tensors
        d_entropy = d_entropy if ctx.entropy else None
        if d_logprobs is None and d_entropy is None:
            return None, None, None, None, None, None, None
        tiles = _Tiles(hidden, weight.shape[0], ctx.scratch, second=d_entropy is not None)
        rows = rows_with_gradient(counted_rows(mask), d_logprobs, d_entropy)
        states, flat_ids = hidden.reshape(-1, hidden.shape[-1])[rows], ids.reshape(-1)[rows]
        slopes = [
            None if column is None else (column.reshape(-1)[rows] / ctx.temperature).to(tiles.dtype)
            for column in (d_logprobs, d_entropy)
        ]
        row_facts = (flat_ids, lse[rows], entropies[rows] if ctx.entropy else None, *slopes)
        d_states = torch.zeros_like(states, dtype=tiles.dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        _backward_tiles(tiles, states, weight, row_facts, ctx.temperature, d_states, d_weight)
        d_hidden = None
        if d_states is not None:
            flat = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
            d_hidden = flat.view(-1, hidden.shape[-1])
            d_hidden[rows] = d_states.to(hidden.dtype)
            d_hidden = d_hidden.view(hidden.shape)
        return d_hidden, d_weight, None, None, None, None, None


def _online_softmax(
    tiles: _Tiles, states: Tensor, weight: Tensor, ids: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one row chunk: log-probability of the ids, log Σ exp z, and the entropy (if asked for)."""
    count = states.shape[0]
    # An id that no tile holds, outside the vocabulary, stays NaN: an error where it counts, and no number.
    chosen = torch.full((count,), torch.nan, dtype=tiles.dtype, device=states.device)
    top = torch.full_like(chosen, -torch.inf)
    # Both relative to the largest z so far: Σ e^(z − top) and Σ e^(z − top) · (z − top).
    total, moment = torch.zeros_like(chosen), torch.zeros_like(chosen)
    for first in range(0, weight.shape[0], tiles.tile):
        z = tiles.logits(states, weight[first : first + tiles.tile], temperature)
        local = ids - first
        inside = (local >= 0) & (local < z.shape[1])
        at_id = z.gather(1, local.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
        chosen = torch.where(inside, at_id, chosen)
        new_top = torch.maximum(top, z.amax(1))
        z -= new_top.unsqueeze(1)
        drop = torch.where(total > 0, top - new_top, 0.0)  # the first tile has nothing to rescale
        decay = drop.exp()
        if entropy:
            moment.add_(total * drop).mul_(decay)
            weights = torch.exp(z, out=tiles.other(z))
            total.mul_(decay).add_(weights.sum(1))
            moment += weights.mul_(z.clamp_(min=_LOWEST)).sum(1)
        else:
            total.mul_(decay).add_(z.exp_().sum(1))
        top = new_top
    scale = total.log()
    return chosen - top - scale, top + scale, scale - moment / total


def _backward_tiles(
    tiles: _Tiles,
    states: Tensor,
    weight: Tensor,
    row_facts: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    temperature: float,
    d_states: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """Recompute each tile, turn it into the slope of its logits and add the two products.

    The vocabulary is the outer loop, so that a narrow weight's gradient tile is summed in float32 over
    all rows before it is rounded, once.
    """
    for first in range(0, weight.shape[0], tiles.tile):
        tile = weight[first : first + tiles.tile]
        out = None if d_weight is None else d_weight[first : first + tiles.tile]
        total = None if out is None else torch.zeros_like(out, dtype=tiles.dtype) if tiles.narrow else out
        for start in range(0, states.shape[0], tiles.rows):
            part = slice(start, start + tiles.rows)
            z = tiles.logits(states[part], tile, temperature)
            slope = _slope(tiles, z, first, *(None if fact is None else fact[part] for fact in row_facts))
            factor = tiles.as_input(slope)
            if d_states is not None:
                _add_product(d_states[part], factor, tile)
            if total is not None:
                _add_product(total, factor.T, states[part])
        if out is not None and total is not None and total is not out:
            out.copy_(total)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right


def _slope(
    tiles: _Tiles,
    z: Tensor,
    first: int,
    ids: Tensor | None,
    lse: Tensor | None,
    entropies: Tensor | None,
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
) -> Tensor:
    """Slope of the loss in a tile's logits, in place of the tile: d(1[id] − p) − dᴴ p (log p + H)."""
    assert ids is not None
    assert lse is not None
    z -= lse.unsqueeze(1)
    if d_entropy is None:
        assert d_logprobs is not None
        z.exp_().mul_(-d_logprobs.unsqueeze(1))
    else:
        assert entropies is not None
        weights = tiles.other(z)
        torch.exp(z, out=weights)
        z.clamp_(min=_LOWEST).add_(entropies.unsqueeze(1)).mul_(-d_entropy.unsqueeze(1))
        if d_logprobs is not None:
            z -= d_logprobs.unsqueeze(1)
        z *= weights
    if d_logprobs is not None:
        local = ids - first
        inside = (local >= 0) & (local < z.shape[1])
        here = torch.where(inside, d_logprobs, 0.0).unsqueeze(1)
        z.scatter_add_(1, local.clamp(0, z.shape[1] - 1).unsqueeze(1), here)
    return z
