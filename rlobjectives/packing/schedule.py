"""Schedules: which packs each rank works on in each optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import check_positive_int, check_seed
from rlobjectives.errors import CapabilityError
from rlobjectives.packing.balance import balance, spread
from rlobjectives.packing.bins import check_lengths, fill_bins

__all__ = ["Schedule", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Packs of sequences, dealt to optimizer steps and ranks.

    Attributes:
        packs: ``packs[step][rank]`` lists the packs of one rank in one step; a pack lists the positions of its
            sequences. Every rank has equally many packs in every step; some may be empty.
        capacity: Tokens a pack holds at most.
    """

    packs: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    capacity: int

    def loads(self, lengths: Tensor) -> Tensor:
        """Tokens of each rank in each step, ``[steps, ranks]``."""
        return torch.tensor(
            [[sum(int(lengths[list(pack)].sum()) for pack in packs) for packs in step] for step in self.packs]
        )


def schedule(
    lengths: Tensor,
    *,
    capacity: int,
    ranks: int = 1,
    steps: int = 1,
    equal_counts: bool = False,
    seed: int | None = None,
) -> Schedule:
    """Pack sequences and deal the packs to steps and ranks so that nobody waits long for another.

    The number of packs is the fewest that best fit finds, rounded up to a multiple of ``steps × ranks``. The
    sequences are then spread over that many packs, longest first to the least loaded; where a capacity is so
    tight that this does not fit, the number of packs grows by another multiple. The plan depends on lengths
    and seed alone, so every rank can make it for itself.

    With a seed the order of things is drawn too: which of equally long sequences takes which place, which share of the
    work is the first step's, which rank gets which part of a step, and which packs come first (in a step, the same ones
    on all ranks, so that packs that run at the same time stay as alike as they are). Which *lengths* share a pack and a
    step is decided by balance alone: loads are the same under every seed.

    Args:
        lengths: Tokens of each sequence, ``[n]``.
        capacity: Tokens a pack holds at most.
        ranks: Data-parallel ranks.
        steps: Optimizer steps the sequences are spread over.
        equal_counts: Every step has equally many sequences on every rank; ``n`` must be a multiple of
            ``steps × ranks``.
        seed: Draws among equally good plans, another with each seed (say, each epoch); None keeps the order given.

    Returns:
        The schedule.

    Raises:
        ShapeError: If the lengths are not integers ``[n]``.
        CapabilityError: If a sequence is longer than the capacity, or ``n`` is no multiple.

    Example:
        >>> plan = schedule(torch.tensor([4, 3, 2, 1]), capacity=5, ranks=2)
        >>> plan.packs
        ((((0, 3),), ((1, 2),)),)
    """
    check_positive_int("ranks", ranks)
    check_positive_int("steps", steps)
    check_seed(seed)
    lengths = check_lengths(lengths, capacity)
    cells = steps * ranks
    dice = None if seed is None else torch.Generator().manual_seed(seed)
    shuffle = _order(lengths.numel(), dice)
    shuffled = lengths[shuffle]
    if equal_counts:
        members = [
            shuffle[own] for own in _members(balance(shuffled.double(), cells, equal_counts=True), cells)
        ]
        most = max(max((_bins(lengths[own], capacity) for own in members), default=1), 1)
        packs = [_spread(lengths, own, capacity, most) for own in members]
        most = max(map(len, packs))
        packs = [[*own, *[()] * (most - len(own))] for own in packs]
    else:
        fewest = max(1, _bins(shuffled, capacity))
        flat = _spread(lengths, shuffle, capacity, -(-fewest // cells) * cells, cells)
        rows = lengths.tolist()
        totals = torch.tensor([float(sum(rows[item] for item in pack)) for pack in flat])
        homes = _members(balance(totals, cells, equal_counts=True), cells)
        packs = [[flat[pack] for pack in own.tolist()] for own in homes]
    plan = []
    for step in _order(steps, dice).tolist():
        places, order = _order(len(packs[0]), dice).tolist(), _order(ranks, dice).tolist()
        plan.append(tuple(tuple(packs[step * ranks + rank][place] for place in places) for rank in order))
    return Schedule(packs=tuple(plan), capacity=capacity)


def _order(count: int, dice: torch.Generator | None) -> Tensor:
    return torch.arange(count) if dice is None else torch.randperm(count, generator=dice)


def _bins(lengths: Tensor, capacity: int) -> int:
    return int(fill_bins(lengths, capacity).max()) + 1 if lengths.numel() else 0


def _members(part: Tensor, parts: int) -> list[Tensor]:
    """The items of each part, in their order."""
    sizes = torch.bincount(part, minlength=parts).tolist()
    return list(torch.split(part.argsort(stable=True), sizes))


def _spread(
    lengths: Tensor, members: Tensor, capacity: int, packs: int, grow: int = 1
) -> list[tuple[int, ...]]:
    """Spread sequences over ``packs`` packs, or the next multiple of ``grow`` more that holds them."""
    own = lengths[members].double()

    def try_with(more: int) -> Tensor | None:
        try:
            return spread(own, packs + more * grow, float(capacity))
        except CapabilityError:  # too tight for this many
            return None

    low, high, home = -1, 0, try_with(0)  # `low` more do not hold them
    while home is None:  # every sequence fits alone, so this ends
        low, high = high, max(1, 2 * high)
        home = try_with(high)
    while high - low > 1:
        middle = (low + high) // 2
        better = try_with(middle)
        if better is None:
            low = middle
        else:
            high, home = middle, better
    return [tuple(sorted(members[items].tolist())) for items in _members(home, packs + high * grow)]
