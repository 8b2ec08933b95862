"""Schedules: which packs each rank works on in each optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import check_positive_int
from rlobjectives.errors import CapabilityError
from rlobjectives.packing.balance import balance
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

    Args:
        lengths: Tokens of each sequence, ``[n]``.
        capacity: Tokens a pack holds at most.
        ranks: Data-parallel ranks.
        steps: Optimizer steps the sequences are spread over.
        equal_counts: Every step has equally many sequences on every rank; ``n`` must be a multiple of
            ``steps × ranks``.
        seed: Shuffles which of the equally good places a sequence gets; None keeps the order given.

    Returns:
        The schedule.

    Raises:
        CapabilityError: If a sequence is longer than the capacity, or ``n`` is no multiple.

    Example:
        >>> plan = schedule(torch.tensor([4, 3, 2, 1]), capacity=5, ranks=2)
        >>> plan.packs
        ((((0, 3),), ((1, 2),)),)
    """
    check_positive_int("ranks", ranks)
    check_positive_int("steps", steps)
    lengths = check_lengths(lengths, capacity)
    cells = steps * ranks
    shuffle = torch.arange(lengths.numel())
    if seed is not None:
        shuffle = torch.randperm(lengths.numel(), generator=torch.Generator().manual_seed(seed))
    shuffled = lengths[shuffle]
    if equal_counts:
        cell = balance(shuffled.double(), cells, equal_counts=True)
        members = [shuffle[cell == place] for place in range(cells)]
        most = max(
            max((int(fill_bins(lengths[own], capacity).max()) + 1 for own in members if len(own)), default=1),
            1,
        )
        packs = [_spread(lengths, own, capacity, most) for own in members]
        most = max(map(len, packs))
        packs = [[*own, *[()] * (most - len(own))] for own in packs]
    else:
        fewest = int(fill_bins(shuffled, capacity).max()) + 1 if lengths.numel() else 1
        flat = _spread(lengths, shuffle, capacity, -(-fewest // cells) * cells, cells)
        totals = torch.tensor([float(lengths[list(pack)].sum()) for pack in flat])
        place = balance(totals, cells, equal_counts=True).tolist()
        packs = [
            [pack for pack, home in zip(flat, place, strict=True) if home == cell_] for cell_ in range(cells)
        ]
    return Schedule(
        packs=tuple(
            tuple(tuple(packs[step * ranks + rank]) for rank in range(ranks)) for step in range(steps)
        ),
        capacity=capacity,
    )


def _spread(
    lengths: Tensor, members: Tensor, capacity: int, packs: int, grow: int = 1
) -> list[tuple[int, ...]]:
    own = lengths[members].double()
    while True:
        try:
            home = balance(own, packs, capacity=float(capacity))
        except CapabilityError:  # too tight for this many: every sequence fits alone, so this ends
            packs += grow
            continue
        return [tuple(sorted(members[home == pack].tolist())) for pack in range(packs)]
