"""A window in one rectangle, from which every other form is made; and how it is drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlobjectives.columns import LOGPROBS, Column
from rlobjectives.layouts import PackedLayout, PaddedLayout, TokenLayout
from rlobjectives.rollouts import Rollouts
from rlobjectives.testing.words import changed
from rlobjectives.tokens import WITH_GRADIENT, TokenBatch

__all__ = ["GARBAGE", "REWARDS", "WHOLE", "Case", "MicroBatch", "Shard", "draw_case"]

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
"""What may stand at places that do not count."""
REWARDS = ("binary", "normal", "heavy", "offset")
"""How rewards are spread; `heavy` has no variance, `offset` is 1e4 ± 1e-3."""
_OWN = ("lengths", "mask", "rewards", "scored", "group_ids", "counted")
_ROLLOUTS = {one.name for one in fields(Rollouts)}
_TOKENS = {one.name for one in fields(TokenBatch)}


@dataclass(frozen=True, repr=False)
class Shard:
    """How a micro-batch is laid out: padded (with extra columns) or packed; garbage under the mask."""

    packed: bool = False
    extra: int = 0
    garbage: float | None = None

    __repr__ = changed


WHOLE = Shard()


@dataclass(frozen=True, repr=False)
class MicroBatch:
    """Sequences of the window, in this order, in some layout."""

    rows: tuple[int, ...]
    shard: Shard = WHOLE

    __repr__ = changed


@dataclass(frozen=True, eq=False)
class Case:
    """A window in one padded rectangle, from which every other form is made.

    Attributes:
        lengths: Tokens of each sequence; the mask may have holes inside and is false beyond.
        mask: Which tokens count, ``[n, t]``.
        rewards: ``[n, r]``.
        scored: Which of them are known, ``[n, r]``.
        group_ids: Prompt of each sequence, ``[n]``.
        counted: False for a sequence that was dropped, ``[n]``; none of its tokens counts.
        columns: Token columns by `TokenBatch` or `Rollouts` name, ``[n, t]``.
        facts: Columns of one entry per sequence, by `Rollouts` name.
        own: Those of them that are a part's own: in `tokens`, and in `rollouts`.
    """

    lengths: Tensor
    mask: Tensor
    rewards: Tensor
    scored: Tensor
    group_ids: Tensor
    counted: Tensor
    columns: Mapping[str, Tensor]
    facts: Mapping[str, Tensor]
    own: tuple[Mapping[str, Column], Mapping[str, Column]] = ({}, {})

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The token columns that may get a gradient."""
        return (*WITH_GRADIENT, *(name for name, one in self.own[0].items() if one.gradient))

    @property
    def count(self) -> int:
        """Number of sequences, dropped ones included."""
        return len(self.lengths)

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in ("mask", "rewards", "scored", "group_ids", "counted")}
        words = (f"{name}={(x.int() if x.dtype is torch.bool else x).tolist()}" for name, x in shown.items())
        return f"Case({', '.join(words)})"

    def replaced(self, **columns: Tensor) -> Case:
        """With other token columns."""
        return replace(self, columns={**self.columns, **columns})

    def permuted(self, order: Tensor) -> Case:
        """The chosen sequences, in this order."""
        return replace(
            self,
            **{name: getattr(self, name)[order] for name in _OWN},
            columns={name: column[order] for name, column in self.columns.items()},
            facts={name: fact[order] for name, fact in self.facts.items()},
        )

    def with_tokens(self) -> Case:
        """Every sequence has at least one token that counts, its first."""
        first = torch.arange(self.mask.shape[1]) == 0
        mask = self.mask | (first & self.counted.unsqueeze(1))
        return replace(self, mask=mask, lengths=self.lengths.clamp_min(1))

    def without(self, refused: Collection[str]) -> Case:
        """Without data that an estimator reports as an error: any of `Estimator.refuses`."""
        case, alive = self, self.mask.any(1, keepdim=True)
        if "sequences_without_positions" in refused:
            case = replace(case, lengths=case.lengths.clamp_min(1))
        if "unscored_sequences" in refused:
            case = replace(case, scored=case.scored | ~case.scored.any(1, keepdim=True))
        if "negative_rewards" in refused:
            case = replace(case, rewards=case.rewards.abs())
        if "rewards_without_tokens" in refused:
            greedy = torch.where(alive, case.facts["greedy_rewards"], 0.0)
            rewards = torch.where(alive, case.rewards, 0.0)
            case = replace(case, rewards=rewards, facts={**case.facts, "greedy_rewards": greedy})
        if "observation_rewards" in refused:
            given = torch.where(case.mask, case.columns["token_rewards"], 0.0)
            case = case.replaced(token_rewards=given)
        return case

    def layout(self) -> PaddedLayout:
        """All sequences, with every fact about their prompts."""
        facts = {} if bool(self.counted.all()) else {"sequence_mask": self.counted}
        return PaddedLayout(self.mask, **facts).with_prompts(self.group_ids)

    def rollouts(self, rows: Tensor | None = None, shard: Shard = WHOLE) -> Rollouts:
        """What an estimator reads about some sequences (all of them by default)."""
        rows = torch.arange(self.count) if rows is None else rows
        columns: dict[str, Any] = {name: fact[rows] for name, fact in self.facts.items() if name in _ROLLOUTS}
        columns |= {name: self._read(name, rows, shard) for name in self.columns if name in _ROLLOUTS}
        return Rollouts(
            rewards=self.rewards[rows],
            scored=self.scored[rows],
            group_ids=self.group_ids[rows],
            layout=self.arrange(rows, shard),
            extra={
                name: self.lay(self.columns[name], rows, shard)
                if one.per == "token"
                else self.facts[name][rows]
                for name, one in self.own[1].items()
            },
            **columns,
        )

    def with_own(self, tokens: Mapping[str, Column], rollouts: Mapping[str, Column]) -> Case:
        """With columns of a part's own, of numbers in [0, 1)."""
        rng = torch.Generator().manual_seed(self.count)
        columns, facts = dict(self.columns), dict(self.facts)
        for name, one in {**tokens, **rollouts}.items():
            numbers = torch.rand(self.mask.shape, generator=rng, dtype=torch.float64).to(
                self.columns["logprobs"]
            )
            if one.per == "token":
                columns[name] = numbers
            else:
                facts[name] = numbers[:, 0]
        return replace(self, columns=columns, facts=facts, own=(tokens, rollouts))

    def tokens(
        self, rows: Tensor, shard: Shard = WHOLE, context: tuple[int, int] = (0, 1), **over: Any
    ) -> TokenBatch:
        """Every column a `TokenBatch` can have, of some sequences."""
        columns = {
            name: self.lay(column, rows, shard, context)
            for name, column in self.columns.items()
            if name in _TOKENS
        }
        own = {
            name: self.lay(self.columns[name], rows, shard, context)
            for name, one in self.own[0].items()
            if one.per == "token"
        }
        return TokenBatch(**{**columns, "layout": self.arrange(rows, shard, context), "extra": own, **over})

    def dummy(self) -> TokenBatch:
        """A micro-batch in which nothing counts and every column is garbage."""
        rows, shard = torch.arange(min(2, self.count)), Shard(garbage=float("nan"))
        nothing = replace(self, mask=torch.zeros_like(self.mask))
        layout = nothing.arrange(rows, shard).with_facts(
            sequence_mask=torch.zeros(len(rows), dtype=torch.bool), total_tokens=torch.zeros(len(rows))
        )
        leaf = torch.full(layout.shape, torch.nan, dtype=self.columns["logprobs"].dtype, requires_grad=True)
        return nothing.tokens(rows, shard, layout=layout, advantages=leaf.detach(), logprobs=leaf)

    def arrange(self, rows: Tensor, shard: Shard = WHOLE, context: tuple[int, int] = (0, 1)) -> TokenLayout:
        """The layout of some sequences; under context parallelism, of this rank's part of each."""
        facts = {name: fact[rows] for name, fact in self.layout().facts.items()}
        facts |= {name: self.facts[name][rows] for name, one in self.own[0].items() if one.per == "sequence"}
        if context[1] > 1:
            facts["total_tokens"] = self.mask[rows].sum(1).double()
        mask = self._lay(self.mask, rows, shard, context, False)
        if not shard.packed:
            return PaddedLayout(mask, **facts)
        lengths = self._part(rows, context).sum(1)
        return PackedLayout(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), mask, **facts)

    def _read(self, name: str, rows: Tensor, shard: Shard) -> Tensor:
        # A finite number at a place that is no action is a reward, and no garbage.
        finite = shard.garbage is not None and abs(shard.garbage) < float("inf")
        if name == "token_rewards" and finite:
            shard = replace(shard, garbage=None)
        return self.lay(self.columns[name], rows, shard)

    def lay(
        self, column: Tensor, rows: Tensor, shard: Shard = WHOLE, context: tuple[int, int] = (0, 1)
    ) -> Tensor:
        """A token column of some sequences, in the shape `arrange` gives them. Differentiable."""
        if shard.garbage is not None:
            column = torch.where(self.mask, column, shard.garbage)
        return self._lay(column, rows, shard, context, 0.0 if shard.garbage is None else shard.garbage)

    def lift(self, laid: Tensor, rows: Tensor, shard: Shard = WHOLE) -> Tensor:
        """The inverse of `lay` for whole sequences: back into the rectangle, zero elsewhere."""
        width = self.mask.shape[1]
        if not shard.packed:
            return laid[:, :width]
        part = self._part(rows, (0, 1))
        return laid.new_zeros(part.shape).masked_scatter(part, laid)

    def _part(self, rows: Tensor, context: tuple[int, int]) -> Tensor:
        rank, size = context
        positions = torch.arange(self.mask.shape[1])
        return (positions < self.lengths[rows].unsqueeze(1)) & (positions % size == rank)

    def _lay(
        self, column: Tensor, rows: Tensor, shard: Shard, context: tuple[int, int], padding: float
    ) -> Tensor:
        chosen = column[rows]
        if shard.packed:
            return chosen[self._part(rows, context)]
        chosen = chosen[:, context[0] :: context[1]]
        if not shard.extra:
            return chosen
        wide = chosen.new_full((len(rows), shard.extra, *chosen.shape[2:]), padding)
        return torch.cat([chosen, wide], dim=1)


def draw_case(
    seed: int,
    sizes: tuple[int, ...] = (2, 3, 4),
    *,
    width: int = 5,
    holes: float = 0.3,
    empty_rows: float = 0.15,
    dropped: float = 0.0,
    spread: float = 0.4,
    rewards: str = "normal",
    unscored: float = 0.0,
    reward_count: int = 2,
    digits: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A window with groups of the given sizes, interleaved, under ids that are neither sorted nor dense.

    Args:
        seed: Of every number below.
        sizes: Completions of each prompt.
        width: Longest sequence.
        holes: Share of tokens inside a sequence that do not count.
        empty_rows: Share of sequences in which nothing counts.
        dropped: Share of sequences that were dropped.
        spread: Scale of the log-ratios; 100 is far outside every clamp.
        rewards: One of `REWARDS`.
        unscored: Share of reward cells without a score.
        reward_count: Reward columns.
        digits: Decimals of every number, where fewer are easier to read.
        dtype: Of the token columns.
    """
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def short(number: Tensor) -> Tensor:
        return number if digits is None else number.round(decimals=digits)

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
    for name in LOGPROBS:
        far = uniform(count, width) < 0.5  # half of the columns keep to a common level, half leave it
        columns[name] = -0.05 - torch.where(far, 2.0 + spread * normal(count, width), 1.5).abs()
    for name in ("entropy", "behavior_kl", "ref_kl", "teacher_divergence", "squared_probs"):
        columns[name] = uniform(count, width)
    for name in ("values", "old_values", "returns", "token_rewards"):
        columns[name] = normal(count, width)
    facts = {
        "session_ids": torch.arange(count),  # sessions are in the order of time, which no law may permute
        "truncated": uniform(count) < 0.3,
        "bootstrap_values": short(normal(count)),
        "greedy_rewards": short(normal(*shape)),
    }
    counted = uniform(count) >= dropped
    if dropped:  # a prompt keeps two of its sequences or none, which estimators that compare them need
        same = (group_ids.unsqueeze(0) == group_ids.unsqueeze(1)) & counted
        counted &= same.sum(1) > 1
    return Case(
        lengths=lengths,
        mask=mask & counted.unsqueeze(1),
        rewards=short(table),
        scored=scored,
        group_ids=group_ids,
        counted=counted,
        columns={name: short(column).to(dtype) for name, column in columns.items()},
        facts=facts,
    )
