"""Bin packing under a token capacity: best fit, longest first, whole classes of items at once."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor

from rlobjectives.checks import check_integral, check_positive_int
from rlobjectives.errors import CapabilityError

__all__ = ["check_lengths", "fill_bins"]


def check_lengths(lengths: Tensor, capacity: int) -> Tensor:
    """Lengths as int64 on the CPU.

    Raises:
        ShapeError: If they are not integers.
        CapabilityError: If a sequence is negative or longer than the capacity, naming it.
    """
    check_positive_int("capacity", capacity)
    check_integral("lengths", lengths)
    lengths = lengths.detach().to("cpu", torch.int64).reshape(-1)
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
        CapabilityError: If a sequence is longer than the capacity.

    Source:
        Best-fit decreasing is at most 11/9 of the optimum (Johnson 1974). TRL packs by the same rule, one
        sequence at a time.

    Example:
        >>> fill_bins(torch.tensor([2, 6, 4, 5]), 8).tolist()
        [0, 0, 2, 1]
    """
    lengths = check_lengths(lengths, capacity)
    order = lengths.argsort(descending=True, stable=True)
    sizes, counts = torch.unique_consecutive(lengths[order], return_counts=True)
    room: dict[int, list[tuple[int, int]]] = {}  # free tokens → ranges of bins that have just that room
    rooms: list[int] = []  # its keys, rising
    runs: list[tuple[int, int, int]] = []  # (first bin, bins, sequences in each), in the order of `order`
    opened = 0

    def put(free: int, first: int, last: int) -> None:
        if free not in room:
            room[free] = []
            insort(rooms, free)
        room[free].append((first, last))

    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            spot = bisect_left(rooms, size)
            if spot == len(rooms):
                each = capacity // size if size else left
                first, last = opened, opened + max(1, left // each)
                opened, free = last, capacity
            else:
                free = rooms[spot]
                each = free // size if size else left
                first, last = room[free].pop()
                if not room[free]:
                    del room[free], rooms[spot]
            # The fullest bin with room is also the fullest after it took one, so it takes all it can.
            whole = min(last - first, left // each)
            if whole:
                runs.append((first, whole, each))
                put(free - each * size, first, first + whole)
                left -= whole * each
                first += whole
            if left and first < last:
                runs.append((first, 1, left))
                put(free - left * size, first, first + 1)
                first, left = first + 1, 0
            if first < last:
                put(free, first, last)
    bins = torch.empty_like(lengths)
    bins[order] = _expand(runs)
    return bins


def _expand(runs: list[tuple[int, int, int]]) -> Tensor:
    first, bins, each = torch.tensor(runs, dtype=torch.int64).reshape(-1, 3).unbind(1)
    items = bins * each
    run = torch.repeat_interleave(torch.arange(len(runs)), items)
    within = torch.arange(run.numel()) - (items.cumsum(0) - items)[run]
    return first[run] + within // each[run].clamp_min(1)
