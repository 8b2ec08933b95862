"""What a law is tried on: an example that prints as Python, how it is drawn, and how a smaller one is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlobjectives.testing.cases import GARBAGE, REWARDS, WHOLE, Case, MicroBatch, Shard, draw_case
from rlobjectives.testing.words import changed

__all__ = ["Dice", "Example", "draw", "smallest"]

_TRIES = 60
"""Examples tried on the way to the smallest."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Example:
    """One window that a law is tried on. It prints as the Python that makes it again.

    Attributes:
        seed: Of every number; the other fields say what is drawn (see `draw_case`).
        sizes: Completions of each prompt.
        width: Longest sequence.
        holes: Share of tokens inside a sequence that do not count.
        empty_rows: Share of sequences in which nothing counts.
        dropped: Share of sequences that were dropped.
        spread: Scale of the log-ratios.
        rewards: How rewards are spread: ``"normal"``, ``"binary"``, ``"heavy"``.
        unscored: Share of rewards without a score.
        digits: Decimals of every number; None for all.
        dtype: Of the token columns.
        shard: How the window is laid out where a law runs it in one piece.
        cut: The micro-batches of each rank, where a law cuts it.
        context: Ranks that share each sequence.
    """

    seed: int = 0
    sizes: tuple[int, ...] = (3, 4)
    width: int = 5
    holes: float = 0.0
    empty_rows: float = 0.0
    dropped: float = 0.0
    spread: float = 0.5
    rewards: str = "normal"
    unscored: float = 0.0
    digits: int | None = None
    dtype: torch.dtype = torch.float64
    shard: Shard = WHOLE
    cut: tuple[tuple[MicroBatch, ...], ...] = ()
    context: int = 1

    __repr__ = changed

    def draw(self, refused: frozenset[str] = frozenset()) -> Case:
        """The window, without data that an estimator reports as an error."""
        case = draw_case(
            self.seed,
            self.sizes,
            width=self.width,
            holes=self.holes,
            empty_rows=self.empty_rows,
            dropped=self.dropped,
            spread=self.spread,
            rewards=self.rewards,
            unscored=self.unscored,
            digits=self.digits,
            dtype=self.dtype,
        )
        return case.without(refused)


class Dice:
    """Draws structure from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311  # no secrets

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return self.rng.randint(low, high)

    def one_of(self, choices: Sequence[Any]) -> Any:
        """One of some values."""
        return choices[self.number(0, len(choices) - 1)]


def draw(dice: Dice, given: Mapping[str, Any], contexts: Sequence[int] = (1,)) -> Example:
    """A window of one to four prompts with two to five completions each, and a cut of it.

    Without `offset` rewards: at 1e4 ± 1e-3 float64 itself has no twelve digits to keep.

    Args:
        dice: Decides.
        given: Fields that a law fixes.
        contexts: Context sizes to choose from.
    """
    drawn = Example(
        seed=dice.number(0, 2**20),
        sizes=tuple(dice.number(2, 5) for _ in range(dice.number(1, 4))),
        width=dice.number(1, 6),
        holes=dice.one_of((0.0, 0.3, 1.0)),
        empty_rows=dice.one_of((0.0, 0.3)),
        dropped=dice.one_of((0.0, 0.0, 0.3)),
        spread=dice.one_of((0.1, 1.0, 100.0)),
        rewards=dice.one_of(REWARDS[:3]),
        unscored=dice.one_of((0.0, 0.3)),
        shard=Shard(packed=bool(dice.number(0, 1)), extra=dice.number(1, 3), garbage=dice.one_of(GARBAGE)),
    )
    drawn = replace(drawn, **given)
    context = dice.one_of(contexts)
    return replace(drawn, cut=_some_cut(dice, sum(drawn.sizes), context), context=context)


def _some_cut(dice: Dice, count: int, context: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Any sequences on any rank in any micro-batch and order; some ranks idle, some with dummies at the end."""
    ranks = dice.number(1 if context > 1 else 2, 3 if context == 1 else 2)
    crowded = dice.number(1, ranks)  # ranks beyond this one stay idle
    depth = dice.number(1 if crowded > 1 else 2, 2)
    order = dice.rng.sample(range(count), count)
    homes = [0, crowded * depth - 1, *(dice.rng.randrange(crowded * depth) for _ in order[2:])]
    plan = []
    for rank in range(ranks):
        batches = []
        for step in range(depth):
            rows = tuple(row for row, home in zip(order, homes, strict=True) if home == rank * depth + step)
            if rows or dice.number(0, 1):  # a micro-batch without any row is welcome too
                shard = Shard(packed=bool(dice.number(0, 1)), extra=dice.number(0, 2))
                batches.append(MicroBatch(rows, shard))
        plan.append(tuple(batches))
    return tuple(plan)


def smallest(example: Example, fails: Callable[[Example], bool], fewest: int = 1) -> Example:
    """A failing example with as little in it as a short greedy search finds.

    Args:
        example: It fails.
        fails: Whether another one does, in the same way.
        fewest: Completions per prompt that the part needs.
    """
    tries = _TRIES
    improved = True
    while improved and tries:
        improved = False
        for simpler in _simpler(example, fewest):
            if not tries:
                break
            tries -= 1
            if fails(simpler):
                example, improved = simpler, True
                break
    return example


def _simpler(example: Example, fewest: int) -> Iterator[Example]:
    for plain in (replace(example, shard=WHOLE), replace(example, cut=())):
        if plain != example:
            yield plain
    sizes = example.sizes
    if len(sizes) > 1:
        yield from (_resized(example, (*sizes[:at], *sizes[at + 1 :])) for at in range(len(sizes)))
    for at, size in enumerate(sizes):
        if size > max(fewest, 1):
            yield _resized(example, (*sizes[:at], size - 1, *sizes[at + 1 :]))
    if example.width > 1:
        yield from (replace(example, width=width) for width in {1, 2, example.width - 1} - {example.width})
    plainer: dict[str, Any] = {"holes": 0.0, "empty_rows": 0.0, "dropped": 0.0, "unscored": 0.0}
    plainer |= {"rewards": "normal", "dtype": torch.float64, "context": 1, "digits": 1}
    if example.spread > 0.5:
        plainer["spread"] = 0.5
    for name, value in plainer.items():
        if getattr(example, name) != value:
            yield replace(example, **{name: value})
    shard = example.shard
    for other in (replace(shard, packed=False), replace(shard, extra=min(shard.extra, 1))):
        if other != shard:
            yield replace(example, shard=other)
    for cut in _simpler_cuts(example.cut):
        yield replace(example, cut=cut)
    if example.seed > 9:
        yield from (replace(example, seed=seed) for seed in range(3))


def _resized(example: Example, sizes: tuple[int, ...]) -> Example:
    count = sum(sizes)
    cut = tuple(
        tuple(replace(batch, rows=tuple(row for row in batch.rows if row < count)) for batch in rank)
        for rank in example.cut
    )
    return replace(example, sizes=sizes, cut=cut)


def _simpler_cuts(
    cut: tuple[tuple[MicroBatch, ...], ...],
) -> Iterator[tuple[tuple[MicroBatch, ...], ...]]:
    for at, rank in enumerate(cut):
        if not any(batch.rows for batch in rank) and len(cut) > 1:
            yield (*cut[:at], *cut[at + 1 :])
        if any(not batch.rows for batch in rank):
            yield (*cut[:at], tuple(batch for batch in rank if batch.rows), *cut[at + 1 :])
    if len(cut) > 1:  # all on one rank
        yield (tuple(batch for rank in cut for batch in rank),)
    for at, rank in enumerate(cut):
        if len(rank) > 1:
            rows = tuple(row for batch in rank for row in batch.rows)
            yield (*cut[:at], (MicroBatch(rows, rank[0].shard),), *cut[at + 1 :])
    plain = tuple(
        tuple(MicroBatch(tuple(sorted(batch.rows)), WHOLE) for batch in rank if batch.rows) for rank in cut
    )
    if plain != cut:
        yield plain
