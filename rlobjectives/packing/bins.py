"""Bin packing under a token capacity: best fit, longest first, whole classes of items at once."""

from __future__ import annotations

from array import array
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
    falling, order = (-lengths).sort(stable=True)  # rising: several times faster than a falling sort
    sizes, counts = torch.unique_consecutive(-falling, return_counts=True)
    bins = torch.empty_like(lengths)
    bins[order] = _expand(_runs(sizes.tolist(), counts.tolist(), capacity))
    return bins


def _runs(sizes: list[int], counts: list[int], capacity: int) -> list[int]:
    """What goes where, as ``first bin, number of bins, sequences in each`` again and again, longest first."""
    room: dict[
        int, list[int]
    ] = {}  # free tokens → the bins with just that room, as `first, end` again and again
    rooms: list[int] = []  # its keys, rising
    runs: list[int] = []
    opened = 0
    for size, left in zip(sizes, counts, strict=True):
        while left:
            # The fullest bin with room is also the fullest after it took one, so it takes all it can.
            spot = bisect_left(rooms, size)
            free = rooms[spot] if spot < len(rooms) else capacity
            each = free // size if size else left
            bins = left // each
            if not bins:
                bins, each = 1, left
            if spot < len(rooms):
                ranges = room[free]
                end, first = ranges.pop(), ranges.pop()
                bins = min(bins, end - first)
                if first + bins < end:
                    ranges += (first + bins, end)
                elif not ranges:
                    del room[free], rooms[spot]
            else:
                first, opened = opened, opened + bins
            runs += (first, bins, each)
            left -= bins * each
            free -= each * size
            if free in room:
                room[free] += (first, first + bins)
            else:
                room[free] = [first, first + bins]
                insort(rooms, free)
    return runs


def _expand(runs: list[int]) -> Tensor:
    if not runs:
        return torch.zeros(0, dtype=torch.int64)
    # By way of an array: torch.tensor of a long list takes several times as long.
    first, bins, each = torch.frombuffer(array("q", runs), dtype=torch.int64).view(-1, 3).unbind(1)
    ends = (bins * each).cumsum(0)
    run = torch.repeat_interleave(bins * each)
    within = torch.arange(run.numel()) - (ends - bins * each)[run]
    return first[run] + within // each[run].clamp_min(1)
