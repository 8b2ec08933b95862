"""The data of `frozen_numbers.py`: a small window from integer arithmetic alone, laid out and cut in several ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlobjectives import PackedLayout, PaddedLayout, Rollouts

__all__ = ["RUNS", "Data", "Run"]


@dataclass(frozen=True)
class Run:
    """One way to lay out and cut the data.

    Attributes:
        packed: Packed, or padded.
        extra: Columns of padding beyond the longest sequence.
        cut: Rows of each micro-batch.
    """

    packed: bool
    extra: int
    cut: tuple[tuple[int, ...], ...]


RUNS: Mapping[str, Run] = {
    "padded": Run(packed=False, extra=0, cut=(tuple(range(12)),)),
    "padded, cut": Run(packed=False, extra=2, cut=((0, 3, 5, 8), (1, 2, 4), (6, 7, 9, 10, 11))),
    "packed": Run(packed=True, extra=0, cut=(tuple(range(12)),)),
    "packed, cut": Run(packed=True, extra=0, cut=((11, 10, 9, 8, 7, 6), (5, 4, 3, 2, 1, 0))),
}


def _hashed(salt: int, count: int) -> list[float]:
    """Numbers in [0, 1) with 53 bits each, from integer arithmetic (splitmix64)."""
    found, state = [], salt
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        found.append(((mixed ^ (mixed >> 31)) >> 11) / 2**53)
    return found


class Data:
    """Twelve answers to four prompts: ragged, interleaved, with holes in the mask and rewards nobody gave.

    Attributes:
        lengths: Tokens of each sequence.
        mask: Which of them count, ``[n, t]``.
        rewards: ``[n, 2]``; the prompt 11 has equal ones.
        scored: ``[n, 2]``; the sequence 2 has none.
        columns: Token columns ``[n, t]``, by name.
        facts: Columns of one entry per sequence, by name.
    """

    width = 5

    def __init__(self) -> None:
        self.group_ids = torch.tensor([7, 2, 7, -3, 11, 2, 7, 11, 2, -3, 11, 2])
        self.lengths = torch.tensor([5, 3, 4, 1, 2, 5, 4, 3, 5, 2, 4, 3])
        count, width = len(self.lengths), self.width
        self.mask = torch.arange(width) < self.lengths.unsqueeze(1)
        self.mask &= self._numbers(1) >= 0.15  # holes
        self.mask[9] = False  # an answer of which nothing counts
        rewards = torch.tensor(_hashed(2, 2 * count), dtype=torch.float64).reshape(count, 2)
        self.rewards = torch.stack([(rewards[:, 0] < 0.5).double(), 2.0 * rewards[:, 1] - 0.75], dim=1)
        self.rewards[self.group_ids == 11] = torch.tensor([1.0, 0.3], dtype=torch.float64)
        self.rewards[9] = 0.0
        self.scored = torch.ones(count, 2, dtype=torch.bool)
        self.scored[2], self.scored[8, 1] = False, False
        self.columns = {
            "logprobs": -0.45 - 2.0 * self._numbers(3),  # with what is added below, none is above 0
            "entropy": self._numbers(8),
            "behavior_kl": self._numbers(9),
            "ref_kl": self._numbers(10),
            "teacher_divergence": self._numbers(11),
            "squared_probs": self._numbers(12),
            "values": 2.0 * self._numbers(13) - 1.0,
            "token_rewards": 0.5 * self._numbers(15) - 0.25,
        }
        self.columns["old_values"] = self.columns["values"] + self._numbers(14) - 0.5
        for salt, name in enumerate(("old", "behavior", "ref", "teacher")):
            self.columns[f"{name}_logprobs"] = self.columns["logprobs"] + 0.8 * self._numbers(4 + salt) - 0.4
        alone = torch.tensor(_hashed(16, 3 * count), dtype=torch.float64).reshape(3, count)
        self.facts = {
            "session_ids": torch.arange(count),
            "truncated": alone[0] < 0.2,
            "bootstrap_values": 2.0 * alone[1] - 1.0,
            "greedy_rewards": alone[1:].T.clone(),
        }

    def _numbers(self, salt: int) -> Tensor:
        shape = len(self.lengths), self.width
        return torch.tensor(_hashed(1000 * salt, shape[0] * shape[1]), dtype=torch.float64).reshape(shape)

    def variants(self) -> Iterator[tuple[str, Data]]:
        """Data from the most general to what the pickiest estimator takes."""
        whole = torch.ones_like(self.scored)
        for name, scored, rewards in (
            ("with missing and negative rewards", self.scored, self.rewards),
            ("with negative rewards", whole, self.rewards),
            ("with missing rewards", self.scored, self.rewards.abs()),
            ("with neither", whole, self.rewards.abs()),
        ):
            other = Data()
            other.scored, other.rewards = scored, rewards
            yield name, other

    def layout(self, run: Run) -> PaddedLayout | PackedLayout:
        """All sequences."""
        if run.packed:
            ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
            found: PaddedLayout | PackedLayout = PackedLayout(ends, self.lay(self.mask, run))
        else:
            found = PaddedLayout(self.lay(self.mask, run))
        return found.with_prompts(self.group_ids)

    def lay(self, column: Tensor, run: Run) -> Tensor:
        """A column ``[n, t]`` in the run's layout, NaN where nothing counts."""
        if column.is_floating_point():
            column = torch.where(self.mask, column, torch.nan)
        if run.packed:
            return column[self._there()]
        padding = torch.nan if column.is_floating_point() else False
        return torch.nn.functional.pad(column, (0, run.extra), value=padding)

    def lift(self, column: Tensor, run: Run) -> Tensor:
        """The inverse of `lay`: counted entries in the order of the rectangle, columns behind."""
        if run.packed:
            whole = column.new_zeros(*self.mask.shape, *column.shape[1:])
            whole[self._there()] = column
            return whole[self.mask]
        return column[:, : self.width][self.mask]

    def _there(self) -> Tensor:
        return torch.arange(self.width) < self.lengths.unsqueeze(1)

    def rollouts(self, run: Run) -> Rollouts:
        """What an estimator reads."""
        names = {one.name for one in fields(Rollouts)} & self.columns.keys()
        columns: dict[str, Any] = {
            **self.facts,
            **{name: self.lay(self.columns[name], run) for name in names},
        }
        return Rollouts(
            rewards=self.rewards,
            scored=self.scored,
            group_ids=self.group_ids,
            layout=self.layout(run),
            **columns,
        )
