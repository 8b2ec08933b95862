"""The exact quantile of a whole window's float32 numbers, from three histograms that merge.

A float32's bits, with the sign folded in, are an integer in the same order. Histograms of its upper 11,
middle 11 and lower 10 bits, each inside the bin the one before points to, lead to the one number of a given
rank. No number is sorted or sent; any cut of the window gives the same answer, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.masking import select
from rlobjectives.statistics.distributions import BINS, Histogram
from rlobjectives.token_parts import Round
from rlobjectives.tokens import TokenBatch

__all__ = [
    "ROUNDS",
    "histogram_rounds",
    "histograms",
    "quantile_histogram",
    "quantile_rounds",
    "window_cutoff",
    "window_quantile",
]

ROUNDS = 3
"""Histograms, one after the other, that single out one number among all float32."""

_SHIFTS = (21, 10, 0)
_WIDTHS = (11, 11, 10)
_SIGN = -(1 << 31)


def _keys(values: Tensor) -> Tensor:
    # Order-preserving bits in [0, 2³²): positive numbers move above all negative ones, which are mirrored.
    bits = (values.detach().to(torch.float32) + 0.0).view(torch.int32)  # −0 becomes 0: they are one value
    ordered = torch.where(bits < 0, ~bits, bits ^ _SIGN)
    return ordered.to(torch.int64) & 0xFFFFFFFF


def _number(key: Tensor) -> Tensor:
    bits = torch.where(key < 1 << 31, ~key, key ^ (1 << 31)) & 0xFFFFFFFF
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).reshape(1).view(torch.float32).squeeze(0)


def quantile_histogram(
    values: Tensor, mask: Tensor, earlier: Sequence[Histogram], fraction: float, *, largest: bool = False
) -> Histogram:
    """Histogram of the values that can still be the quantile, of one micro-batch.

    Args:
        values: Any shape; rounded to float32.
        mask: Which of them count.
        earlier: Merged histograms of the rounds before.
        fraction: See `window_quantile`.
        largest: See `window_quantile`.
    """
    turn = len(earlier)
    keys = _keys(select(values.detach(), mask))
    inside = mask
    if turn:
        inside = mask & ((keys >> _SHIFTS[turn - 1]) == _descend(earlier, fraction, largest).key)
    bins = (keys >> _SHIFTS[turn]) & ((1 << _WIDTHS[turn]) - 1)
    return Histogram.of(bins, keys, inside)


def window_quantile(rounds: Sequence[Histogram], fraction: float, *, largest: bool = False) -> Tensor:
    """The smallest value at or above which a ``1 − fraction`` share lies: order statistic ⌈q·(N − 1)⌉.

    Those are exactly the values that are not below `torch.quantile`'s interpolated threshold.

    Args:
        rounds: The merged histograms of all `ROUNDS`.
        fraction: q in [0, 1].
        largest: Count from the top instead: the ⌊q·N⌋-th largest value, the largest of all at least.

    Returns:
        0-d float32; −∞ when nothing was counted.

    Example:
        >>> values, rounds = torch.tensor([0.1, 0.4, -0.2, 0.3]), []
        >>> for _ in range(ROUNDS):
        ...     rounds.append(quantile_histogram(values, torch.ones(4, dtype=torch.bool), rounds, 0.5))
        >>> window_quantile(rounds, 0.5)
        tensor(0.3000)
    """
    found = _descend(rounds, fraction, largest)
    return torch.where(found.counted, _number(found.key), -torch.inf)


def window_cutoff(rounds: Sequence[Histogram], fraction: float, *, largest: bool = False) -> Tensor:
    """A number half-way between `window_quantile` and the next smaller value of the window.

    It separates the same values, and the rounding of a second forward changes the fate of none.

    Args:
        rounds: The merged histograms of all `ROUNDS`.
        fraction: See `window_quantile`.
        largest: See `window_quantile`.

    Returns:
        0-d float64, to be compared with float32 values; −∞ where no value is smaller.

    Example:
        >>> values, rounds = torch.tensor([0.125, 0.5, -0.25, 0.25]), []
        >>> for _ in range(ROUNDS):
        ...     rounds.append(quantile_histogram(values, torch.ones(4, dtype=torch.bool), rounds, 0.5))
        >>> window_cutoff(rounds, 0.5)
        tensor(0.1875, dtype=torch.float64)
    """
    found = _descend(rounds, fraction, largest)
    half_way = (_number(found.key).double() + _number(found.previous).double()) / 2.0
    return torch.where(found.counted & found.any_below, half_way, -torch.inf)


def quantile_rounds(
    values: Callable[[TokenBatch, WindowContext], Tensor], fraction: float, *, largest: bool = False
) -> tuple[Round, ...]:
    """The rounds of a part that must know a quantile of the window; `histograms` reads what they found.

    Args:
        values: Of the tokens of a micro-batch, shaped like the mask.
        fraction: See `window_quantile`.
        largest: See `window_quantile`.
    """

    def measure(turn: int, tokens: TokenBatch, context: WindowContext) -> dict[str, Histogram]:
        numbers, earlier = values(tokens, context), histograms(context, turn)
        found = quantile_histogram(numbers, tokens.layout.mask, earlier, fraction, largest=largest)
        return {f"round_{turn}": found}

    return histogram_rounds(measure)


def histogram_rounds(
    measure: Callable[[int, TokenBatch, WindowContext], dict[str, Histogram]], count: int = ROUNDS
) -> tuple[Round, ...]:
    """Rounds of one histogram each, named by their number."""
    return tuple(
        Round({f"round_{turn}": Histogram}, functools.partial(measure, turn)) for turn in range(count)
    )


def histograms(context: WindowContext, count: int = ROUNDS) -> list[Histogram]:
    """The merged histograms of the first rounds."""
    return [context.get(f"round_{turn}", Histogram) for turn in range(count)]


class _Found(NamedTuple):
    # The upper bits of the value that is sought, as far as the rounds go, and the key of the one below it.
    key: Tensor
    previous: Tensor
    any_below: Tensor
    counted: Tensor


def _descend(rounds: Sequence[Histogram], fraction: float, largest: bool) -> _Found:
    count = rounds[0].counts.sum()
    # A hair beside it, so that q·(N − 1) = 3 + 1e-13 still means the fourth value, and q·N = 3 − 1e-13 the third.
    if largest:
        rank = (count - (count * fraction + 1e-9).floor().clamp_min(1.0)).clamp_min(0.0)
    else:
        rank = ((count - 1.0).clamp_min(0.0) * fraction - 1e-9).ceil().clamp_min(0.0)
    key = torch.zeros((), dtype=torch.int64, device=count.device)
    previous, any_below = key, count > count
    order = torch.arange(BINS, device=count.device)
    for turn, found in enumerate(rounds):
        running = found.counts.cumsum(0)
        chosen = (running <= rank).sum().clamp_max(BINS - 1)
        before = running.index_select(0, (chosen - 1).clamp_min(0).reshape(1)).squeeze(0)
        rank = rank - torch.where(chosen > 0, before, 0.0)
        key = (key << _WIDTHS[turn]) | chosen
        lower = (order < chosen) & (found.counts > 0)
        any_below = any_below | lower.any()
        previous = torch.maximum(previous, torch.where(lower, found.peaks, 0.0).amax().long())
    return _Found(key, previous, any_below, count > 0)
