"""One window run through the public API: on one rank, or cut over many, simulated by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlobjectives import (
    Communicator,
    Objective,
    PackedLayout,
    PaddedLayout,
    Rollouts,
    TokenBatch,
    TokenLayout,
    Window,
)

__all__ = [
    "WHOLE",
    "Case",
    "CountingCommunicator",
    "MicroBatch",
    "Outcome",
    "Shard",
    "run_ranks_as_threads",
    "run_window",
    "simulate",
]

WITH_GRADIENT = ("logprobs", "entropy", "behavior_kl", "ref_kl", "teacher_divergence", "values")
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


@dataclass(frozen=True)
class Shard:
    """How a micro-batch is laid out: padded (with extra columns) or packed; garbage under the mask."""

    packed: bool = False
    extra: int = 0
    garbage: float | None = None


WHOLE = Shard()


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the window, in this order, in some layout."""

    rows: tuple[int, ...]
    shard: Shard = WHOLE


@dataclass(frozen=True, eq=False)
class Case:
    """A window in one padded rectangle, from which every other form is made.

    Attributes:
        lengths: Tokens of each sequence; the mask may have holes inside and is false beyond.
        columns: Token columns by `TokenBatch` or `Rollouts` name.
        facts: Columns of one entry a sequence, by `Rollouts` name.
    """

    lengths: Tensor
    mask: Tensor
    rewards: Tensor
    scored: Tensor
    group_ids: Tensor
    columns: Mapping[str, Tensor]
    facts: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return (
            f"Case(mask={self.mask.int().tolist()}, rewards={self.rewards.tolist()}, "
            f"scored={self.scored.int().tolist()}, group_ids={self.group_ids.tolist()})"
        )

    def replaced(self, **columns: Tensor) -> Case:
        """With other token columns."""
        return replace(self, columns={**self.columns, **columns})

    def permuted(self, order: Tensor) -> Case:
        """The same sequences in another order."""
        own = {
            name: getattr(self, name)[order] for name in ("lengths", "mask", "rewards", "scored", "group_ids")
        }
        columns = {name: column[order] for name, column in self.columns.items()}
        return replace(
            self, **own, columns=columns, facts={name: fact[order] for name, fact in self.facts.items()}
        )

    def layout(self) -> PaddedLayout:
        """All sequences, with every fact about their prompts."""
        return PaddedLayout(self.mask).with_prompts(self.group_ids)

    def rollouts(self, rows: Tensor | None = None, shard: Shard = WHOLE) -> Rollouts:
        """What an estimator reads about some sequences (all of them by default)."""
        rows = torch.arange(self.count) if rows is None else rows
        names = [name for name in self.columns if name in {one.name for one in fields(Rollouts)}]
        layout = self.arrange(rows, shard)
        return Rollouts(
            rewards=self.rewards[rows],
            scored=self.scored[rows],
            group_ids=self.group_ids[rows],
            layout=layout,
            **{name: fact[rows] for name, fact in self.facts.items()},
            **{name: self.lay(self.columns[name], rows, shard) for name in names},
        )

    def arrange(self, rows: Tensor, shard: Shard = WHOLE, context: tuple[int, int] = (0, 1)) -> TokenLayout:
        """The layout of some sequences; under context parallelism, of this rank's part of each."""
        facts = {name: fact[rows] for name, fact in self.layout().facts.items()}
        if context[1] > 1:
            facts["total_tokens"] = self.mask[rows].sum(1).double()
        mask = self._lay(self.mask, rows, shard, context, False)
        if not shard.packed:
            return PaddedLayout(mask, **facts)
        lengths = self._part(rows, context).sum(1)
        return PackedLayout(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), mask, **facts)

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
        return torch.cat(
            [chosen, chosen.new_full((len(rows), shard.extra, *chosen.shape[2:]), padding)], dim=1
        )


@dataclass
class Outcome:
    """What a window gives: the same three things for every cut."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    advantages: Tensor
    scale: float = 1.0
    collectives: list[int] = field(default_factory=list)


def token_batch(
    case: Case,
    rows: Tensor,
    shard: Shard = WHOLE,
    context: tuple[int, int] = (0, 1),
    **over: Any,
) -> TokenBatch:
    """Every column a `TokenBatch` can have, of some sequences."""
    known = {one.name for one in fields(TokenBatch)}
    columns = {
        name: case.lay(column, rows, shard, context) for name, column in case.columns.items() if name in known
    }
    return TokenBatch(**{**columns, "layout": case.arrange(rows, shard, context), **over})


def estimate_whole_groups(objective: Objective, case: Case, homes: Sequence[Tensor]) -> Tensor:
    """The estimate of every sequence, made where its whole group is, laid back into the window's order."""
    table: Tensor | None = None
    for rows in homes:
        part = objective.estimator.estimate(case.rollouts(rows))
        if table is None:
            table = part.new_zeros(case.count, *part.shape[1:])
        table[rows] = part
    assert table is not None
    return table


class ThreadCommunicator(Communicator):
    """One rank of a group of threads, `context` of them sharing each sequence."""

    def __init__(self, rank: int, board: _Board, context: int, context_board: _Board) -> None:
        super().__init__()
        self.rank, self.world_size, self.board = rank, board.ranks, board
        self.context_board, self.context_rank = context_board, rank % context
        self.collectives = 0
        if context > 1:
            self.context_group = context_board
            self.owns_sequences = self.context_rank == 0

    def gather(self, row: Tensor) -> Tensor:
        self.collectives += 1
        return torch.stack(self.board.exchange(self.rank, row))

    def context_sum(self, per_sequence: Tensor) -> Tensor:
        if self.context_group is None:
            return per_sequence
        return _ThreadSum.apply(per_sequence, self)

    def total(self, value: Tensor) -> Tensor:
        """Sum over the context ranks, without gradient."""
        return torch.stack(self.context_board.exchange(self.context_rank, value)).sum(0)


class _ThreadSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, communicator: ThreadCommunicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.total(value.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.communicator.total(grads[0]), None


class LonelyRankError(Exception):
    """Another rank left while this one waits for it: on real ranks, a hang."""


class _Board:
    """Where threads lay rows and read each other's, one round after the other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rounds: list[dict[int, Tensor]] = []
        self.next = [0] * ranks
        self.changed = threading.Condition()
        self.left = False

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Every rank's value of this round, in rank order."""
        with self.changed:
            turn, self.next[rank] = self.next[rank], self.next[rank] + 1
            if turn == len(self.rounds):
                self.rounds.append({})
            row = self.rounds[turn]
            row[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(row) == self.ranks or self.left, timeout=20.0)
            if len(row) < self.ranks:
                raise LonelyRankError(f"rank {rank} waits for an exchange that others never begin")
        return [row[one] for one in range(self.ranks)]

    def leave(self) -> None:
        """Tell the others that a rank will not come again."""
        with self.changed:
            self.left = True
            self.changed.notify_all()


class CountingCommunicator(Communicator):
    """A single process that counts how often it is asked to exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0

    def gather(self, row: Tensor) -> Tensor:
        self.collectives += 1
        return super().gather(row)


def run_ranks_as_threads(
    function: Callable[[ThreadCommunicator], Any], world: int, context: int = 1
) -> list[Any]:
    """Run a function once a rank, all at the same time. What a rank raises is its result."""
    board = _Board(world)
    context_boards = [_Board(context) for _ in range(world // context)]
    results: list[Any] = [None] * world

    def work(rank: int) -> None:
        try:
            results[rank] = function(
                ThreadCommunicator(rank, board, context, context_boards[rank // context])
            )
        except Exception as error:  # noqa: BLE001  # what a rank raises is its result
            results[rank] = error
        board.leave()
        context_boards[rank // context].leave()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def run_window(
    objective: Objective,
    case: Case,
    batches: Sequence[MicroBatch],
    estimate: Tensor,
    communicator: Communicator,
    context: tuple[int, int] = (0, 1),
) -> Outcome:
    """One rank's share of a window, the way an adapter does it: add, freeze, loss, backward, summarise."""
    leaves = {name: case.columns[name].detach().clone().requires_grad_() for name in WITH_GRADIENT}
    live = case.replaced(**leaves)
    builder = objective.window(communicator)
    todo = []
    for batch in batches:
        rows = torch.tensor(batch.rows, dtype=torch.long)
        part = estimate[rows]
        if objective.estimator.token_level:
            part = case.lay(estimate, rows, replace(batch.shard, garbage=None), context)
        tokens = token_batch(live, rows, batch.shard, context)
        todo.append((rows, part, tokens, batch.shard))
        builder.add(estimate=part, layout=tokens.layout)
        if objective.capabilities.needs_prepass:
            builder.add_prepass(tokens)
    window = builder.freeze()
    outputs, total, scale = [], torch.zeros((), dtype=torch.float64), 0.0
    weighed = communicator.world_size == 1
    advantages = torch.zeros(case.mask.shape, dtype=torch.float64)
    for rows, part, tokens, shard in todo:
        final = window.advantages(part, tokens.layout)
        if context[1] == 1:
            advantages[rows] = case.lift(final.detach().double(), rows, shard)
        tokens = tokens.replace(advantages=final)
        output = window.loss(tokens)
        output.loss.backward()
        outputs.append(output)
        total = total + output.loss.detach().double()
        if weighed:  # only the reference needs it
            scale += magnitude(objective, window, tokens)
    for _ in range(window.micro_batches - len(batches)):  # dummies keep ranks in step
        outputs.append(window.loss(dummy(case)))
        assert float(outputs[-1].loss.detach()) == 0.0
    metrics = window.summarize(outputs)
    gradients = {
        name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()
    }
    collectives = [getattr(communicator, "collectives", -1)]
    return Outcome(total, gradients, metrics, advantages, scale, collectives)


def magnitude(objective: Objective, window: Window, tokens: TokenBatch) -> float:
    """``Σ w·|value|`` at the largest advantage: what a relative tolerance of the loss is relative to.

    Values cancel in the sum, and an advantage near zero is only as precise as the spread it came from.
    """
    weights, still = window.weights(tokens.layout), tokens.detach()
    assert still.advantages is not None
    top = still.layout.select(still.advantages.abs()).max() if still.advantages.numel() else 0.0
    still = still.replace(advantages=still.advantages.sign() * top)
    parts = [
        part.value_and_slope(still, window.context(scope)) for scope, part in objective.token_terms().items()
    ]
    return sum(float(tokens.layout.select(part.value.abs().double() * weights).sum()) for part in parts)


def dummy(case: Case) -> TokenBatch:
    """A micro-batch in which nothing counts and every column is garbage."""
    rows, shard = torch.arange(min(2, case.count)), Shard(garbage=float("nan"))
    nothing = replace(case, mask=torch.zeros_like(case.mask))
    layout = nothing.arrange(rows, shard).with_facts(
        sequence_mask=torch.zeros(len(rows), dtype=torch.bool), total_tokens=torch.zeros(len(rows))
    )
    leaf = torch.full(layout.shape, torch.nan, dtype=case.columns["logprobs"].dtype, requires_grad=True)
    return token_batch(nothing, rows, shard, layout=layout, advantages=leaf.detach(), logprobs=leaf)


def whole(objective: Objective, case: Case, shard: Shard = WHOLE) -> Outcome:
    """The window in one process and one micro-batch: what every cut must equal."""
    estimate = objective.estimator.estimate(case.rollouts())
    batch = MicroBatch(rows=tuple(range(case.count)), shard=shard)
    return run_window(objective, case, [batch], estimate, CountingCommunicator())


def simulate(
    objective: Objective,
    case: Case,
    ranks: Iterable[Sequence[MicroBatch]],
    context: int = 1,
    estimate: Tensor | None = None,
) -> list[Outcome | Exception]:
    """The window cut over data × context ranks, all running at once."""
    plan = list(ranks)
    if estimate is None:
        ids = case.group_ids.unique()
        homes = [
            torch.isin(case.group_ids, ids[k :: len(plan)]).nonzero().flatten() for k in range(len(plan))
        ]
        estimate = estimate_whole_groups(objective, case, [rows for rows in homes if len(rows)])

    def one(communicator: ThreadCommunicator) -> Outcome:
        place, part = divmod(communicator.rank, context)
        return run_window(objective, case, plan[place], estimate, communicator, (part, context))

    return run_ranks_as_threads(one, len(plan) * context, context)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """What all ranks' gradients and losses add up to; metrics must agree on all of them."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.metrics == first.metrics, "ranks report different metrics"
    return Outcome(
        loss=torch.stack([one.loss for one in outcomes]).sum(),
        gradients={
            name: torch.stack([one.gradients[name] for one in outcomes]).sum(0) for name in first.gradients
        },
        metrics=first.metrics,
        advantages=torch.stack([one.advantages for one in outcomes]).sum(0),
        scale=sum(one.scale for one in outcomes),
        collectives=[count for one in outcomes for count in one.collectives],
    )
