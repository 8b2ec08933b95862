"""Balancing: split items into parts of nearly equal load, largest first."""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from rlobjectives.checks import check_finite, check_positive_int
from rlobjectives.errors import CapabilityError, ShapeError

__all__ = ["balance"]


def balance(
    costs: Tensor, parts: int, *, equal_counts: bool = False, capacity: float | None = None
) -> Tensor:
    """Give each item, largest first, to the part with the least load (LPT).

    Args:
        costs: Load of each item, ``[n]``, finite and not negative: tokens, or an estimate of the work.
        parts: Number of parts.
        equal_counts: Every part gets equally many items; ``n`` must be a multiple of ``parts``.
        capacity: Largest load of a part; None for no limit. Not with ``equal_counts``.

    Returns:
        Part of each item, int64 ``[n]`` on the CPU.

    Raises:
        CapabilityError: If the parts cannot hold the items under the capacity, or ``n`` is no multiple.

    Source:
        Graham 1969: the largest part is at most 4/3 of the optimum. verl uses Karmarkar-Karp, whose spread is
        smaller for few items and whose cost grows faster.

    Example:
        >>> balance(torch.tensor([5.0, 4.0, 3.0, 2.0]), 2).tolist()
        [0, 1, 1, 0]
    """
    check_positive_int("parts", parts)
    if costs.dim() != 1:
        raise ShapeError(f"costs has shape {list(costs.shape)}; expected [n], one load an item.")
    costs = costs.detach().to("cpu", torch.float64)
    check_finite("costs", costs)
    if bool((costs < 0).any()):
        raise CapabilityError("costs holds negative loads; a load is at least 0.")
    order = costs.argsort(descending=True, stable=True)
    assigned = torch.empty(costs.numel(), dtype=torch.int64)
    if equal_counts:
        assigned[order] = _in_rounds(costs[order], parts)
    else:
        assigned[order] = _one_by_one(costs[order], parts, math.inf if capacity is None else capacity)
    return assigned


def _one_by_one(falling: Tensor, parts: int, capacity: float) -> Tensor:
    loads = [(0.0, part) for part in range(parts)]  # a heap already
    chosen = []
    for cost in falling.tolist():
        load, part = loads[0]
        if load + cost > capacity:
            raise CapabilityError(
                f"{parts} parts of {capacity:g} cannot hold the items: the least loaded has {load:g} and the next "
                f"item needs {cost:g}. Use more parts, or a larger capacity."
            )
        heapq.heapreplace(loads, (load + cost, part))
        chosen.append(part)
    return torch.tensor(chosen, dtype=torch.int64)


def _in_rounds(falling: Tensor, parts: int) -> Tensor:
    if falling.numel() % parts:
        raise CapabilityError(
            f"{falling.numel()} items cannot be split into {parts} parts of equal count. Pad to a multiple of "
            f"{parts}, or set equal_counts=False."
        )
    rounds = falling.view(-1, parts)
    loads = torch.zeros(parts, dtype=torch.float64)
    chosen = torch.empty(rounds.shape, dtype=torch.int64)
    for place, items in enumerate(rounds):  # n / parts rounds, each over all parts at once
        chosen[place] = loads.argsort(stable=True)
        loads[chosen[place]] += items
    return chosen.flatten()
