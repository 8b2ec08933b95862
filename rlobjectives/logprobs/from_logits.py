"""Log-probabilities and entropy of tokens from logits, in cache-sized chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlobjectives.checks import check_integral, check_shape
from rlobjectives.errors import ShapeError
from rlobjectives.logprobs.inputs import (
    check_inputs,
    compute_dtype,
    counted_rows,
    rows_with_gradient,
)

__all__ = ["sequence_logprobs", "token_logprobs"]

# Two buffers of this many numbers are alive at a time: 1.5 MiB each in float32, which stays in cache.
_CHUNK_ELEMENTS = 384 * 1024
# exp() of anything below is 0 in float64 too, so clamping there keeps 0 · (−inf) out of the entropy.
_LOWEST = -1000.0


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token, and on request the entropy of the distribution it came from.

        z = logits / T,   log p(id) = z[id] − log Σⱼ exp zⱼ,   H = −Σⱼ pⱼ log pⱼ

    The gradient is in closed form. Beyond the gradient of the logits itself about 4 MiB are needed,
    whatever the vocabulary; the only tensor saved is the logits, which exist anyway. Rows that are
    masked, or into which no gradient flows, are skipped: a NaN in them stays where it is.

    Args:
        logits: Unnormalised scores ``[*tokens, v]``, any floating dtype. Give a contiguous tensor:
            another one is copied whole.
        ids: Token ids ``[*tokens]``.
        temperature: T > 0, the one the tokens were sampled with; dimensionless.
        mask: Bool ``[*tokens]``, True where the token counts. None: everywhere.
        entropy: Whether to compute the entropy as well.

    Returns:
        Log-probabilities in nats and entropies in nats (or None), ``[*tokens]``, in float32 (float64
        for float64 logits), 0 where the mask is false. Both carry gradient to `logits`, once: a
        second derivative is not supported.

    Raises:
        ShapeError: If shapes or dtypes do not fit.
        CapabilityError: If the temperature is not positive.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> found, _ = token_logprobs(logits, torch.tensor([0]), temperature=0.6)
        >>> round(found.item(), 6)
        -0.202573
    """
    check_inputs("logits", logits, ids, mask, temperature)
    logprobs, entropies = _FromLogits.apply(  # type: ignore[no-untyped-call]
        logits, ids, mask, float(temperature), entropy
    )
    return logprobs, entropies if entropy else None


def sequence_logprobs(
    logits: Tensor,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same for the tokens of whole sequences: column t is about ``input_ids[:, t]`` given its prefix.

    A causal model's logits at t − 1 predict the token at t. The ids are shifted, not the logits, so
    that no copy of them is made.

    Args:
        logits: A causal model's output ``[b, t, v]``.
        input_ids: The sequences it read, ``[b, t]``.
        temperature: As in `token_logprobs`.
        mask: Bool ``[b, t]`` aligned with `input_ids`, True where the token counts. Position 0, which
            nothing precedes, must not: its log-probability is then NaN, which the window refuses.
        entropy: Whether to compute the entropy as well.

    Returns:
        As `token_logprobs`, ``[b, t]``; column 0 is 0.

    Raises:
        ShapeError: If the shapes do not fit.

    Example:
        >>> logits, ids = torch.zeros(1, 3, 4), torch.tensor([[2, 0, 1]])
        >>> sequence_logprobs(logits, ids)[0].exp().tolist()
        [[1.0, 0.25, 0.25]]
    """
    if logits.dim() != 3:
        raise ShapeError(f"logits has shape {list(logits.shape)}; expected [b, t, v].")
    check_integral("input_ids", input_ids)
    check_shape("input_ids", input_ids, tuple(logits.shape[:2]), "the shape of logits without v")
    counted = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
    check_shape("mask", counted, tuple(input_ids.shape), "one flag per token")
    ahead = torch.zeros_like(counted)
    ahead[:, :-1] = counted[:, 1:]
    following = torch.zeros_like(input_ids)
    following[:, :-1] = input_ids[:, 1:]
    found = token_logprobs(logits, following, temperature=temperature, mask=ahead, entropy=entropy)
    logprobs, entropies = (None if column is None else _delay(column) for column in found)
    assert logprobs is not None
    if mask is not None:
        logprobs[:, 0] = torch.where(mask[:, 0], torch.nan, 0.0)
    return logprobs, entropies


def _delay(column: Tensor) -> Tensor:
    return torch.nn.functional.pad(column[:, :-1], (1, 0))


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        table, flat_ids = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)
        rows = counted_rows(mask)
        dtype = compute_dtype(logits.dtype)
        count = flat_ids.numel()
        logprobs = torch.zeros(count, dtype=dtype, device=logits.device)
        lse = torch.zeros_like(logprobs)
        entropies = torch.zeros(count if entropy else 0, dtype=dtype, device=logits.device)
        for chunk in _chunks(rows, count, table.shape[1]):
            z = _scaled(table, chunk, dtype, temperature)
            chosen = z.gather(1, flat_ids[chunk].unsqueeze(1)).squeeze(1)
            top = z.amax(1, keepdim=True)
            z -= top
            weights = z.exp()
            total = weights.sum(1)
            scale = total.log()
            lse[chunk] = scale + top.squeeze(1)
            logprobs[chunk] = chosen - top.squeeze(1) - scale
            if entropy:
                z.clamp_(min=_LOWEST)
                entropies[chunk] = scale - weights.mul_(z).sum(1) / total
        ctx.save_for_backward(logits, ids, mask, lse, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        ctx.set_materialize_grads(False)
        shape = ids.shape
        return logprobs.view(shape), entropies.view(shape) if entropy else entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits, ids, mask, lse, entropies = ctx.saved_tensors
        d_entropy = d_entropy if ctx.entropy else None
        if d_logprobs is None and d_entropy is None:
            return None, None, None, None, None
        table, flat_ids = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)
        rows = rows_with_gradient(counted_rows(mask), d_logprobs, d_entropy)
        gradient = torch.zeros_like(table)
        for chunk in _chunks(rows, rows.numel(), table.shape[1]):
            z = _scaled(table, chunk, lse.dtype, ctx.temperature)
            z -= lse[chunk].unsqueeze(1)
            slope = z.exp()
            if d_entropy is None:
                assert d_logprobs is not None
                slope *= -_part(d_logprobs, chunk, ctx.temperature)
            else:
                z.clamp_(min=_LOWEST).add_(entropies[chunk].unsqueeze(1))
                z *= -_part(d_entropy, chunk, ctx.temperature)
                if d_logprobs is not None:
                    z -= _part(d_logprobs, chunk, ctx.temperature)
                slope *= z
            if d_logprobs is not None:
                at_id = flat_ids[chunk].unsqueeze(1)
                slope.scatter_add_(1, at_id, _part(d_logprobs, chunk, ctx.temperature))
            gradient[chunk] = slope.to(gradient.dtype)
        return gradient.view(logits.shape), None, None, None, None


def _scaled(table: Tensor, chunk: Tensor | slice, dtype: torch.dtype, temperature: float) -> Tensor:
    """A private copy of some rows, divided by the temperature."""
    picked = table[chunk]
    own = picked.to(dtype, copy=isinstance(chunk, slice))  # picking by position has copied already
    return own if temperature == 1.0 else own.div_(temperature)


def _part(gradient: Tensor, chunk: Tensor | slice, temperature: float) -> Tensor:
    return gradient.reshape(-1)[chunk].unsqueeze(1) / temperature


def _chunks(rows: Tensor | None, count: int, width: int) -> Iterator[Tensor | slice]:
    """Cut the rows into chunks that fit the cache: slices when all rows count, positions otherwise."""
    size = max(1, _CHUNK_ELEMENTS // max(1, width))
    for start in range(0, count, size):
        yield slice(start, start + size) if rows is None else rows[start : start + size]
