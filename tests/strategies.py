"""Hypothesis strategies: windows of ragged prompt groups, and ways to cut them over ranks.

Structure (groups, lengths, cuts) is drawn, so that it shrinks; numbers come from a drawn seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.windows import Case, MicroBatch, Shard

__all__ = ["Cut", "Dice", "cases", "cuts", "draw_case", "some_case", "some_cut"]

REWARDS = ("binary", "normal", "heavy", "offset")
"""How rewards are spread; `heavy` has no variance, `offset` is 1e4 ± 1e-3."""


@dataclass(frozen=True)
class Cut:
    """One way to spread a window: micro-batches of every data-parallel rank, each on some context ranks."""

    ranks: list[list[MicroBatch]] = field(default_factory=list)
    context: int = 1

    def __repr__(self) -> str:
        rows = [[list(one.rows) for one in rank] for rank in self.ranks]
        return f"Cut(rows={rows}, context={self.context})"


def draw_case(
    seed: int,
    sizes: tuple[int, ...] = (2, 3, 4),
    *,
    width: int = 5,
    holes: float = 0.3,
    empty_rows: float = 0.15,
    spread: float = 0.4,
    rewards: str = "normal",
    unscored: float = 0.0,
    reward_count: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A window with groups of the given sizes, interleaved, under ids that are neither sorted nor dense.

    Args:
        seed: Of every number below.
        sizes: Completions of each prompt.
        width: Longest sequence.
        holes: Share of tokens inside a sequence that do not count.
        empty_rows: Share of sequences in which nothing counts.
        spread: Scale of the log-ratios; 100 is far outside every clamp.
        rewards: One of `REWARDS`.
        unscored: Share of reward cells without a score.
        reward_count: Reward columns.
        dtype: Of the token columns.
    """
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    count = sum(sizes)
    ids = torch.repeat_interleave(torch.tensor([7 - 5 * k for k in range(len(sizes))]), torch.tensor(sizes))
    group_ids = ids[torch.randperm(count, generator=rng)]
    lengths = torch.randint(0, width + 1, (count,), generator=rng)
    positions = torch.arange(width).unsqueeze(0)
    mask = (positions < lengths.unsqueeze(1)) & (uniform(count, width) >= holes)
    mask &= (uniform(count) >= empty_rows).unsqueeze(1)
    shape = (count, reward_count)
    table = {
        "binary": (uniform(*shape) < 0.5).double(),
        "normal": normal(*shape),
        "heavy": torch.tan(3.1 * (uniform(*shape) - 0.5)),
        "offset": 1e4 + 1e-3 * normal(*shape),
    }[rewards]
    scored = uniform(*shape) >= unscored
    columns: dict[str, Tensor] = {}
    for name in ("logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs", "teacher_logprobs"):
        far = uniform(count, width) < 0.5  # half of the columns keep to a common level, half leave it
        columns[name] = -0.05 - torch.where(far, 2.0 + spread * normal(count, width), 1.5).abs()
    for name in ("entropy", "behavior_kl", "ref_kl", "teacher_divergence", "squared_probs"):
        columns[name] = uniform(count, width)
    for name in ("values", "old_values", "returns", "token_rewards"):
        columns[name] = normal(count, width)
    facts = {
        "session_ids": torch.arange(count),  # sessions are in the order of time, which no law may permute
        "truncated": uniform(count) < 0.3,
        "bootstrap_values": normal(count),
        "greedy_rewards": normal(*shape),
    }
    return Case(
        lengths=lengths,
        mask=mask,
        rewards=table,
        scored=scored,
        group_ids=group_ids,
        columns={name: column.to(dtype) for name, column in columns.items()},
        facts=facts,
    )


class Dice:
    """Draws structure: from hypothesis, which shrinks it, or from a seed, which is one quick example."""

    def __init__(self, source: st.DrawFn | int) -> None:
        self.source = source
        self.rng = random.Random(source if isinstance(source, int) else 0)

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        if isinstance(self.source, int):
            return self.rng.randint(low, high)
        return self.source(st.integers(low, high))

    def one_of(self, choices: Sequence[Any]) -> Any:
        """One of some values."""
        return choices[self.number(0, len(choices) - 1)]


def some_case(dice: Dice, dtype: torch.dtype = torch.float64) -> Case:
    """A window of one to four prompts with two to five completions each, all in one precision.

    Without `offset` rewards: at 1e4 ± 1e-3 float64 itself has no twelve digits to keep.
    """
    return draw_case(
        dice.number(0, 2**20),
        tuple(dice.number(2, 5) for _ in range(dice.number(1, 4))),
        width=dice.number(1, 6),
        holes=dice.one_of((0.0, 0.3, 1.0)),
        empty_rows=dice.one_of((0.0, 0.3)),
        spread=dice.one_of((0.1, 1.0, 100.0)),
        rewards=dice.one_of(REWARDS[:3]),
        unscored=dice.one_of((0.0, 0.3)),
        dtype=dtype,
    )


def some_cut(dice: Dice, case: Case, context_sizes: tuple[int, ...] = (1, 1, 2, 3)) -> Cut:
    """Any rows on any rank in any micro-batch and order; some ranks idle, some with dummies at the end."""
    context = dice.one_of(context_sizes)
    ranks = dice.number(1, 3 if context == 1 else 2)
    depth = dice.number(1, 2)
    crowded = dice.number(1, ranks)  # ranks beyond this one stay idle
    rng = random.Random(dice.number(0, 2**20))
    order = rng.sample(range(case.count), case.count)
    homes = [rng.randrange(crowded * depth) for _ in order]
    plan: list[list[MicroBatch]] = []
    for rank in range(ranks):
        batches = []
        for step in range(depth):
            rows = tuple(row for row, home in zip(order, homes, strict=True) if home == rank * depth + step)
            if rows or dice.number(0, 1):  # a micro-batch without any row is welcome too
                shard = Shard(packed=bool(dice.number(0, 1)), extra=dice.number(0, 2))
                batches.append(MicroBatch(rows=rows, shard=shard))
        plan.append(batches)
    return Cut(plan, context)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Case:
    """`some_case` for hypothesis."""
    return some_case(Dice(draw), dtype)


@st.composite
def cuts(draw: st.DrawFn, case: Case, context_sizes: tuple[int, ...] = (1, 1, 2, 3)) -> Cut:
    """`some_cut` for hypothesis."""
    return some_cut(Dice(draw), case, context_sizes)
