"""Balancing: split items into parts of nearly equal load, largest first, then by exchanging items."""

from __future__ import annotations

import heapq
import math
from bisect import insort

import torch
from torch import Tensor

from rlobjectives.checks import check_finite, check_number, check_positive_int, check_tensor
from rlobjectives.errors import CapabilityError, ShapeError

__all__ = ["balance", "spread"]

_EVEN = 1e-4
"""A largest load this close above the mean is even enough: nobody waits longer than that share of a step."""

_SEARCHES = 4096
"""Most pairs of parts that are searched for an exchange, so that very many parts stay cheap."""


def balance(
    costs: Tensor, parts: int, *, equal_counts: bool = False, capacity: float | None = None
) -> Tensor:
    """Give each item, largest first, to the part with the least load (LPT); then let parts exchange items.

    While the largest load is more than a ten-thousandth above the mean, that part swaps the pair of items with the
    least loaded part that brings the two nearest to each other (or, unless counts must be equal, gives an
    item away). No exchange makes the largest load larger.

    Args:
        costs: Load of each item, ``[n]``, finite and not negative: tokens, or an estimate of the work.
        parts: Number of parts.
        equal_counts: Every part gets equally many items; ``n`` must be a multiple of ``parts``.
        capacity: Largest load of a part; None for no limit. Not with ``equal_counts``, which decides how many items a
            part holds, whatever they weigh.

    Returns:
        Part of each item, int64 ``[n]`` on the CPU.

    Raises:
        CapabilityError: If the parts cannot hold the items under the capacity (or it is no number), ``n`` is no
            multiple, or both kinds of limits are given.

    Source:
        Graham 1969: the largest part is at most 4/3 of the optimum, before any exchange. verl uses
        Karmarkar-Karp: as even for many items, at a cost that grows faster, and with equal counts far less even
        (`benchmarks/packing.py`).

    Example:
        >>> balance(torch.tensor([5.0, 4.0, 3.0, 2.0]), 2).tolist()
        [0, 1, 1, 0]
    """
    costs = _check_costs(costs, parts)
    if capacity is not None:
        check_number("capacity", capacity, low=0.0)
    if equal_counts and capacity is not None:
        raise CapabilityError(
            f"balance got equal_counts=True and capacity={capacity:g}, but parts of equal counts may weigh more. Leave "
            "the capacity out and look at the loads, or set equal_counts=False."
        )
    order = costs.argsort(descending=True, stable=True)
    falling = costs[order].tolist()
    if equal_counts:
        chosen = _in_rounds(falling, parts)
    else:
        chosen = _one_by_one(falling, parts, math.inf if capacity is None else capacity)
    _exchange(falling, chosen, parts, equal_counts)
    assigned = torch.empty(costs.numel(), dtype=torch.int64)
    assigned[order] = torch.tensor(chosen, dtype=torch.int64)
    return assigned


def spread(costs: Tensor, parts: int, capacity: float) -> Tensor:
    """`balance` under a capacity without exchanges, for very many parts that need only hold their items.

    Raises:
        CapabilityError: If the parts cannot hold the items.
    """
    costs = _check_costs(costs, parts)
    order = costs.argsort(descending=True, stable=True)
    assigned = torch.empty(costs.numel(), dtype=torch.int64)
    assigned[order] = torch.tensor(_one_by_one(costs[order].tolist(), parts, capacity), dtype=torch.int64)
    return assigned


def _check_costs(costs: Tensor, parts: int) -> Tensor:
    check_positive_int("parts", parts)
    check_tensor("costs", costs)
    if costs.dim() != 1:
        raise ShapeError(f"costs has shape {list(costs.shape)}; expected [n], one load an item.")
    costs = costs.detach().to("cpu", torch.float64)
    check_finite("costs", costs)
    if bool((costs < 0).any()):
        raise CapabilityError("costs holds negative loads; a load is at least 0.")
    return costs


def _one_by_one(falling: list[float], parts: int, capacity: float) -> list[int]:
    loads = [(0.0, part) for part in range(parts)]  # a heap already
    chosen = []
    for cost in falling:
        load, part = loads[0]
        if load + cost > capacity:
            raise CapabilityError(
                f"{parts} parts of {capacity:g} cannot hold the items: the least loaded has {load:g} and the next "
                f"item needs {cost:g}. Use more parts, or a larger capacity."
            )
        heapq.heapreplace(loads, (load + cost, part))
        chosen.append(part)
    return chosen


def _in_rounds(falling: list[float], parts: int) -> list[int]:
    if len(falling) % parts:
        raise CapabilityError(
            f"{len(falling)} items cannot be split into {parts} parts of equal count. Pad to a multiple of "
            f"{parts}, or set equal_counts=False."
        )
    loads, ranking, chosen = [0.0] * parts, list(range(parts)), []
    for start in range(0, len(falling), parts):  # a round: one item a part, the largest to the least loaded
        ranking.sort(key=loads.__getitem__)
        chosen += ranking
        for part, cost in zip(ranking, falling[start : start + parts], strict=True):
            loads[part] += cost
    return chosen


def _exchange(falling: list[float], chosen: list[int], parts: int, equal_counts: bool) -> None:
    """Even the parts out in place."""
    loads = [0.0] * parts
    for cost, part in zip(falling, chosen, strict=True):
        loads[part] += cost
    enough = (1.0 + _EVEN) * sum(loads) / parts
    if max(loads) <= enough:
        return
    members: list[list[tuple[float, int]]] = [[] for _ in range(parts)]  # (cost, place), rising
    for place in reversed(range(len(falling))):
        members[chosen[place]].append((falling[place], place))
    ranking = sorted((load, part) for part, load in enumerate(loads))
    spot = searches = 0  # the part that the heaviest is compared with: the lightest first
    while ranking[-1][0] > enough and spot < parts - 1 and searches < _SEARCHES:
        (least, light), (most, heavy) = ranking[spot], ranking[-1]
        searches += 1
        pair = _nearest_pair(members[heavy], members[light], most - least, equal_counts)
        if pair is None:
            spot += 1
            continue
        given = members[heavy].pop(pair[0])
        moved = given[0]
        if pair[1] is not None:
            taken = members[light].pop(pair[1])
            moved -= taken[0]
            insort(members[heavy], taken)
        insort(members[light], given)
        del ranking[-1], ranking[spot]
        insort(ranking, (most - moved, heavy))
        insort(ranking, (least + moved, light))
        spot = 0
    for part, own in enumerate(members):
        for _, place in own:
            chosen[place] = part


def _nearest_pair(
    heavy: list[tuple[float, int]], light: list[tuple[float, int]], gap: float, equal_counts: bool
) -> tuple[int, int | None] | None:
    """Which items to exchange so that two parts with this gap come nearest; None if no exchange helps.

    Both lists rise, and so does the item wanted in return: one walk over both finds the best of all pairs.
    """
    returns = [cost for cost, _ in light] if equal_counts else [0.0, *(cost for cost, _ in light)]
    distance, best, below = 0.5 * gap * (1.0 - 1e-9), None, 0
    for place, (cost, _) in enumerate(heavy):
        wanted = cost - 0.5 * gap
        while below + 1 < len(returns) and returns[below + 1] <= wanted:
            below += 1
        for spot in range(below, min(below + 2, len(returns))):
            if abs(returns[spot] - wanted) < distance:
                distance, best = abs(returns[spot] - wanted), (place, spot)
    if best is None or equal_counts:
        return best
    return best[0], best[1] - 1 if best[1] else None
