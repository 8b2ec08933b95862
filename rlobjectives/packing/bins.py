"""Bin packing under a token capacity: best fit, longest first, whole classes of items at once."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

import torch
from torch import Tensor

from rlobjectives.checks import check_integral, check_positive_int
from rlobjectives.errors import CapabilityError, ShapeError

__all__ = ["check_lengths", "fill_bins"]


def check_lengths(lengths: Tensor, capacity: int) -> Tensor:
    """Lengths as int64 on the CPU.

    Raises:
        ShapeError: If they are not integers in one dimension.
        CapabilityError: If a sequence is negative or longer than the capacity, naming it.
    """
    check_positive_int("capacity", capacity)
    check_integral("lengths", lengths, meaning="the tokens of each sequence")
    if lengths.dim() != 1:
        raise ShapeError(f"lengths has shape {list(lengths.shape)}; expected [n], one length per sequence.")
    lengths = lengths.detach().to("cpu", torch.int64)
    wrong = (lengths > capacity) | (lengths < 0)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise CapabilityError(
            f"{int(wrong.sum()):,} of {lengths.numel():,} sequences do not fit; sequence {first} has "
            f"{int(lengths[first]):,} tokens and the capacity is {capacity:,}. Raise the capacity, or cut or drop "
            "long sequences before planning."
        )
    return lengths


def fill_bins(lengths: Tensor, capacity: int) -> Tensor:
    """Best-fit-decreasing bin packing.

    Each sequence, longest first, goes to the fullest bin that still has room. Sequences of one length see
    the same choice, so a whole class of bins is filled at once: the cost follows the number of *different*
    lengths, and the bins are exactly those of the one-by-one algorithm.

    Args:
        lengths: Tokens of each sequence, ``[n]``, integers from 0 to ``capacity``.
        capacity: Tokens a bin holds.

    Returns:
        Bin of each sequence, int64 ``[n]`` on the CPU; bins are numbered from 0 without gaps.

    Raises:
        ShapeError: If the lengths are not integers ``[n]``.
        CapabilityError: If a sequence is longer than the capacity.

    Source:
        Best-fit decreasing is at most 11/9 of the optimum (Johnson 1974). TRL packs by the same rule, one
        sequence at a time.

    Example:
        >>> fill_bins(torch.tensor([2, 6, 4, 5]), 8).tolist()
        [0, 0, 2, 1]
    """
    lengths = check_lengths(lengths, capacity)
    narrow = torch.int32 if capacity < 2**31 else torch.int64
    falling, order = (
        (-lengths).to(narrow).sort(stable=True)
    )  # rising: several times faster than a falling sort
    sizes, counts = torch.unique_consecutive(-falling, return_counts=True)
    bins = torch.empty_like(lengths)
    bins[order] = _expand(*_runs(sizes.tolist(), counts.tolist(), capacity))
    return bins


def _runs(sizes: list[int], counts: list[int], capacity: int) -> tuple[array[int], array[int], array[int]]:
    """What goes where, longest first: first bin, number of bins, and sequences in each, run by run."""
    firsts, widths, depths = array("q"), array("q"), array("q")
    # Ranges of neighbouring bins with the same room lie on stacks, one for each room, chained through `below`.
    # Arrays: thousands of small lists would keep the garbage collector busy.
    start, stop, below = array("q"), array("q"), array("q")
    top: dict[int, int] = {}  # room → the uppermost range with just that room
    # Its keys: those the present size fits, the smallest in front, and (negated) the others, the largest in front.
    fitting: list[int] = []
    tight: list[int] = []
    opened, smallest = 0, sizes[-1] if sizes else 0
    for size, left in zip(sizes, counts, strict=True):
        while tight and -tight[0] >= size:
            heappush(fitting, -heappop(tight))
        while left:
            # The fullest bin with room is also the fullest after it took one, so it takes all it can.
            room = fitting[0] if fitting else capacity
            each, bins = 1, left
            if left > 1 and room >= size + size:
                each = room // size if size else left
                bins = left // each
                if not bins:
                    each, bins = left, 1
            if fitting:
                used = top[room]
                first, last = start[used], stop[used]
                if first + bins < last:
                    start[used] = first + bins
                else:
                    bins = last - first
                    if below[used] >= 0:
                        top[room] = below[used]
                    else:
                        del top[heappop(fitting)]
            else:
                first, opened = opened, opened + bins
            firsts.append(first)
            widths.append(bins)
            depths.append(each)
            left -= bins * each
            room -= each * size
            if room >= smallest:  # else nothing fits any more
                under = top.get(room, -1)
                if under < 0 and room >= size:
                    heappush(fitting, room)
                elif under < 0:
                    heappush(tight, -room)
                top[room] = len(start)
                start.append(first)
                stop.append(first + bins)
                below.append(under)
    return firsts, widths, depths


def _expand(firsts: array[int], widths: array[int], depths: array[int]) -> Tensor:
    if not firsts:
        return torch.zeros(0, dtype=torch.int64)
    first, bins, each = (torch.frombuffer(column, dtype=torch.int64) for column in (firsts, widths, depths))
    filled = (first - bins.cumsum(0) + bins).repeat_interleave(bins)
    filled += torch.arange(filled.numel())
    return filled.repeat_interleave(each.repeat_interleave(bins))
