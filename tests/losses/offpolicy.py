"""A window of stale samples, run whole or in pieces through the public API."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlobjectives import (
    LOCAL,
    Communicator,
    Estimator,
    Objective,
    PackedLayout,
    PaddedLayout,
    Rollouts,
    TokenBatch,
    TokenLayout,
)
from rlobjectives.distributed import full_token_counts

COLUMNS = ("logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs", "teacher_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Estimator):
    """The reward is the advantage."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return rollouts.rewards.sum(1)


@dataclass
class Data:
    """Columns of a window as one padded rectangle; ``advantages`` one per sequence."""

    mask: Tensor
    advantages: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, advantages: Sequence[float], **columns: Any) -> Data:
        """From nested lists; None in a list is a masked place (filled with NaN)."""
        tensors = {}
        for name, rows in columns.items():
            cells = [[float("nan") if x is None else float(x) for x in row] for row in rows]
            tensors[name] = torch.tensor(cells, dtype=torch.float64)
        mask = torch.tensor([[x is not None for x in row] for row in columns["logprobs"]])
        return cls(mask, torch.tensor(advantages, dtype=torch.float64), tensors)

    @classmethod
    def random(
        cls, lengths: Sequence[int], seed: int = 0, spread: float = 0.6, dtype: torch.dtype = torch.float64
    ) -> Data:
        generator = torch.Generator().manual_seed(seed)
        width = max(*lengths, 1)
        mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        base = -3.0 * torch.rand(len(lengths), width, generator=generator, dtype=torch.float64)
        columns = {
            name: (base + spread * torch.randn(base.shape, generator=generator, dtype=torch.float64))
            .clamp_max(-1e-3)
            .to(dtype)
            for name in COLUMNS
        }
        advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        return cls(mask, advantages, columns)

    def rows(self, index: Sequence[int]) -> Data:
        chosen = torch.tensor(list(index), dtype=torch.long)
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return Data(self.mask[chosen], self.advantages[chosen], columns)

    def shard(self, rank: int, size: int) -> Data:
        """This context-parallel rank's share of the tokens of every sequence."""
        width = -(-self.mask.shape[1] // size)
        part = slice(rank * width, (rank + 1) * width)
        return Data(self.mask[:, part], self.advantages, {k: v[:, part] for k, v in self.columns.items()})

    def dummy(self) -> Data:
        """One sequence of which nothing counts."""
        one = self.rows([0]) if len(self.advantages) else self
        return dataclasses.replace(one, mask=torch.zeros_like(one.mask), advantages=one.advantages * 0)

    def layout(self, *, packed: bool = False, counted: bool = True) -> TokenLayout:
        facts = {} if counted else {"sequence_mask": torch.zeros(len(self.mask), dtype=torch.bool)}
        if not packed:
            return PaddedLayout(self.mask, **facts)
        bounds = torch.arange(len(self.mask) + 1) * self.mask.shape[1]
        return PackedLayout(bounds, self.mask.reshape(-1), **facts)

    def tokens(self, layout: TokenLayout, logprobs: Tensor, **more: Any) -> TokenBatch:
        columns = {k: v.reshape(layout.shape) for k, v in self.columns.items() if k != "logprobs"}
        return TokenBatch(logprobs=logprobs, layout=layout, **{**columns, **more})


@dataclass
class Result:
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]
    collectives: int = 0


def run(
    objective: Objective,
    pieces: Sequence[Data],
    communicator: Communicator = LOCAL,
    *,
    packed: bool = False,
    counted: Sequence[bool] | None = None,
    totals: bool | None = None,
    **more: Any,
) -> Result:
    """Open the window with its pre-pass, take every loss and its gradient (on masked places too)."""
    builder = objective.window(communicator)
    counts = counted or [True] * len(pieces)
    leaves = [piece.columns["logprobs"].clone().requires_grad_() for piece in pieces]
    layouts = [piece.layout(packed=packed, counted=flag) for piece, flag in zip(pieces, counts, strict=True)]
    if totals:  # context-parallel ranks hold shards, and tell the layout how long each sequence is
        layouts = [
            one.with_facts(total_tokens=full_token_counts(one.local_counts(), communicator))
            for one in layouts
        ]
    prepass = objective.capabilities.needs_prepass
    for piece, leaf, layout in zip(pieces, leaves, layouts, strict=True):
        builder.add(estimate=piece.advantages, layout=layout)
        if prepass:
            builder.add_prepass(piece.tokens(layout, leaf.detach().reshape(layout.shape), **more))
    window = builder.freeze()
    outputs = []
    for piece, leaf, layout in zip(pieces, leaves, layouts, strict=True):
        advantages = window.advantages(piece.advantages, layout)
        tokens = piece.tokens(layout, leaf.reshape(layout.shape), advantages=advantages, **more)
        outputs.append(window.loss(tokens))
    total = sum((output.loss for output in outputs), torch.zeros((), dtype=torch.float64))
    if total.requires_grad:
        total.backward()
    metrics = window.summarize(outputs)
    gradient = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    flat = torch.cat([g.reshape(-1) for g in gradient]) if gradient else torch.zeros(0)
    return Result(total.detach(), flat, metrics)


def single(objective: Objective, data: Data, **options: Any) -> Result:
    """The whole window in one micro-batch on one process."""
    return run(objective, [data], **options)
