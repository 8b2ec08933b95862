"""Bin packing against TRL's best-fit-decreasing search, balancing against verl's Karmarkar-Karp.

    python -m benchmarks.packing [--quick]

Lengths are lognormal, their median a tenth of the capacity. Of TRL's function only the search is timed, without
moving tokens; ours sorts as well, TRL's lengths are sorted before. The lists that verl takes are made before, too.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import PeerMissingError, trl_bin_search, verl_balancing, version
from benchmarks.timing import Row, arguments, compare, table
from rlobjectives.packing import balance, fill_bins, schedule

CAPACITIES = (2048, 32_768)


def lengths_of(count: int, capacity: int) -> Tensor:
    """Lengths of completions: most short, some as long as allowed."""
    rng = torch.Generator().manual_seed(count + capacity)
    spread = torch.exp(0.8 * torch.randn(count, generator=rng))
    return (0.1 * capacity * spread).round().clamp(1, capacity).long()


def excess(loads: list[float]) -> float:
    """The largest load over the mean, less 1: the share of a step that the others wait."""
    return max(loads) * len(loads) / sum(loads) - 1.0


def against_trl(counts: tuple[int, ...], rounds: int) -> list[Row]:
    """Time and number of bins beside TRL's search."""
    import pyarrow

    peer, found = trl_bin_search(), []
    for count in counts:
        for capacity in CAPACITIES:
            lengths = lengths_of(count, capacity)
            rank = lengths.argsort(descending=True, stable=True)
            pairs = pyarrow.StructArray.from_arrays(
                [pyarrow.array(lengths[rank].numpy()), pyarrow.array(rank.numpy())], ["length", "id"]
            )
            ours, theirs = partial(fill_bins, lengths, capacity), partial(peer, pairs, capacity)
            row = compare(f"{count:>9,} into {capacity:,}", ours, theirs, rounds=rounds)
            bins, fewest = int(ours().max()) + 1, -(-int(lengths.sum()) // capacity)
            note = f"{bins:,} bins, TRL {len(theirs()):,}, no packing needs fewer than {fewest:,}"
            found.append(dataclasses.replace(row, note=note))
    return found


def against_verl(sizes: tuple[tuple[int, int], ...], rounds: int) -> list[Row]:
    """Time and evenness beside verl's balancing."""
    peer, found = verl_balancing(), []
    for count, parts in sizes:
        for equal in (False, True):
            lengths = lengths_of(count, 32_768)
            costs, plain = lengths.double(), lengths.tolist()
            ours = partial(balance, costs, parts, equal_counts=equal)
            theirs = partial(peer, plain, parts, equal)
            row = compare(
                f"{count:>7,} over {parts:>2}{', equal counts' * equal}",
                ours,
                theirs,
                rounds=rounds,
                repeat=3,
            )
            loads = torch.zeros(parts, dtype=torch.float64).index_add_(0, ours(), costs)
            others = [float(sum(plain[item] for item in own)) for own in theirs()]
            note = f"largest over mean − 1: {excess(loads.tolist()):.1e}, verl {excess(others):.1e}"
            found.append(dataclasses.replace(row, note=note))
    return found


def plans(counts: tuple[int, ...], rounds: int) -> list[Row]:
    """A whole schedule beside the search of TRL alone, which knows no ranks and no steps."""
    import pyarrow

    peer, found = trl_bin_search(), []
    for count in counts:
        lengths = lengths_of(count, 32_768)
        rank = lengths.argsort(descending=True, stable=True)
        pairs = pyarrow.StructArray.from_arrays(
            [pyarrow.array(lengths[rank].numpy()), pyarrow.array(rank.numpy())], ["length", "id"]
        )
        ours = partial(schedule, lengths, capacity=32_768, ranks=8, steps=4)
        row = compare(f"{count:>9,} over 8 × 4", ours, partial(peer, pairs, 32_768), rounds=rounds)
        plan = ours()
        packs = sum(len(packs) for step in plan.packs for packs in step)
        note = f"{packs:,} packs; largest over mean − 1: {excess(plan.loads(lengths).flatten().tolist()):.1e}"
        found.append(dataclasses.replace(row, note=note))
    return found


def main() -> None:
    """Print the tables."""
    quick = arguments(__doc__ or "").quick
    rounds = 3 if quick else 5
    counts = (10_000,) if quick else (10_000, 100_000)
    sizes = (
        ((128, 8), (1024, 8)) if quick else ((64, 8), (128, 8), (1024, 8), (1024, 64), (9984, 8), (9984, 64))
    )
    print(f"torch {torch.__version__}, one thread, CPU time of the thread")
    try:
        table(f"bins: TRL {version('trl')} _pack_bfd, its search", against_trl(counts, rounds))
        table("steps and ranks as well: the same search", plans(counts, rounds))
    except PeerMissingError as missing:
        print(missing)
    try:
        table(f"balance: verl {version('verl')} karmarkar_karp", against_verl(sizes, rounds))
    except PeerMissingError as missing:
        print(missing)


if __name__ == "__main__":
    main()
