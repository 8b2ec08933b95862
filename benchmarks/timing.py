"""Fair comparisons on a machine that is not quiet: CPU time of this thread, interleaved, medians of ratios."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Row", "arguments", "compare", "peak_bytes", "table"]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        label: What was computed, and how large.
        ours: Median CPU milliseconds.
        theirs: Median CPU milliseconds of the peer.
        ratio: Median of the peer's time over ours, pair by pair.
        note: Anything else.
    """

    label: str
    ours: float
    theirs: float
    ratio: float
    note: str = ""


def compare(
    label: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    rounds: int,
    repeat: int = 1,
    note: str = "",
) -> Row:
    """Time two functions in turn, after one call of each to warm up.

    Args:
        label: Name of the row.
        ours: Called ``repeat`` times a round, for the peer may be much slower.
        theirs: Called once a round.
        rounds: Rounds.
        repeat: Calls of ``ours`` in a round.
        note: Printed beside the row.
    """
    ours()
    theirs()
    pairs = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(repeat):
            ours()
        middle = time.thread_time()
        theirs()
        pairs.append(((middle - start) / repeat * 1e3, (time.thread_time() - middle) * 1e3))
    return Row(
        label,
        statistics.median(mine for mine, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(other / mine for mine, other in pairs),
        note,
    )


def peak_bytes(function: Callable[[], object]) -> int:
    """Most bytes that tensors made by a call hold at once, by torch's own allocation records."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = function()
    held = highest = 0
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    for one in sorted(events, key=lambda event: event.start_ns()):
        held += one.nbytes()
        highest = max(highest, held)
    del result
    return highest


def table(title: str, rows: Sequence[Row]) -> None:
    """Print rows under a title."""
    width = max(len(row.label) for row in rows)
    print(f"\n{title}\n{'':{width}}  {'ours ms':>9}  {'peer ms':>9}  {'ratio':>7}")
    for row in rows:
        print(f"{row.label:{width}}  {row.ours:9.2f}  {row.theirs:9.2f}  {row.ratio:6.1f}×  {row.note}")


def arguments(description: str) -> argparse.Namespace:
    """The options that every benchmark has; also sets torch to one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, about ten seconds")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    return chosen
