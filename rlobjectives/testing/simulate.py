"""One window run through the public API: on one rank, or cut over many, which are threads here."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlobjectives.distributed.communicator import Communicator
from rlobjectives.objective import Objective
from rlobjectives.testing.cases import WHOLE, Case, MicroBatch, Shard
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import Window

__all__ = [
    "CountingCommunicator",
    "LonelyRankError",
    "Outcome",
    "run_ranks_as_threads",
    "run_window",
    "simulate",
    "together",
    "whole",
]

_PATIENCE = 60.0
"""Seconds a rank waits for another that has not left."""


@dataclass
class Outcome:
    """What a window gives: the same loss, gradients, metrics and advantages for every cut.

    Attributes:
        loss: 0-d float64.
        gradients: By column, ``[n, t]``.
        metrics: What `Window.summarize` reports.
        advantages: ``[n, t]``; zero under context parallelism.
        scale: What the loss's rounding is relative to.
        collectives: Exchanges of each rank.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    advantages: Tensor
    scale: float = 1.0
    collectives: list[int] = field(default_factory=list)


class CountingCommunicator(Communicator):
    """A single process that counts how often it is asked to exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0

    def gather(self, row: Tensor) -> Tensor:
        """One more exchange."""
        self.collectives += 1
        return super().gather(row)


class LonelyRankError(Exception):
    """Another rank left while this one waits for it: on real ranks, a hang."""


class _Board:
    """Where threads lay rows and read each other's, one exchange after the other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.exchanges: list[dict[int, Tensor]] = []
        self.next = [0] * ranks
        self.changed = threading.Condition()
        self.left = False

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Every rank's value of this exchange, in rank order."""
        with self.changed:
            turn, self.next[rank] = self.next[rank], self.next[rank] + 1
            if turn == len(self.exchanges):
                self.exchanges.append({})
            row = self.exchanges[turn]
            row[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(row) == self.ranks or self.left, timeout=_PATIENCE)
            if len(row) < self.ranks:
                raise LonelyRankError(f"rank {rank} waits for an exchange that others never begin")
        return [row[one] for one in range(self.ranks)]

    def leave(self) -> None:
        """Tell the others that a rank will not come again."""
        with self.changed:
            self.left = True
            self.changed.notify_all()


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
        """Every rank's row, one exchange on the board."""
        self.collectives += 1
        return torch.stack(self.board.exchange(self.rank, row))

    def context_sum(self, per_sequence: Tensor) -> Tensor:
        """Differentiable sum over the context ranks."""
        if self.context_group is None:
            return per_sequence
        found: Tensor = _ThreadSum.apply(per_sequence, self)
        return found

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
        found: Tensor = ctx.communicator.total(grads[0])
        return found, None


def run_ranks_as_threads(
    function: Callable[[ThreadCommunicator], Any], world: int, context: int = 1
) -> list[Any]:
    """Run a function once per rank, all at the same time. What a rank raises is its result."""
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
    """One rank's share of a window, the way an adapter does it: add, freeze, loss, backward, summarize."""
    leaves = {name: case.columns[name].detach().clone().requires_grad_() for name in case.differentiable}
    live = case.replaced(**leaves)
    builder = objective.window(communicator)
    todo = []
    for batch in batches:
        rows = torch.tensor(batch.rows, dtype=torch.long)
        part = estimate[rows]
        if objective.estimator.token_level:
            part = case.lay(estimate, rows, replace(batch.shard, garbage=None), context)
        tokens = live.tokens(rows, batch.shard, context)
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
    # Dummies keep ranks in step.
    outputs += [window.loss(case.dummy()) for _ in range(window.micro_batches - len(batches))]
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


def whole(objective: Objective, case: Case, shard: Shard = WHOLE, estimate: Tensor | None = None) -> Outcome:
    """The window in one process and one micro-batch: what every cut must equal."""
    if estimate is None:
        estimate = objective.estimator.estimate(case.rollouts())
    batch = MicroBatch(rows=tuple(range(case.count)), shard=shard)
    return run_window(objective, case, [batch], estimate, CountingCommunicator())


def simulate(
    objective: Objective | Sequence[Objective],
    case: Case,
    ranks: Iterable[Sequence[MicroBatch]],
    context: int = 1,
    estimate: Tensor | None = None,
) -> list[Outcome | Exception]:
    """The window cut over data × context ranks, all running at once, each with an objective of its own.

    Args:
        objective: Copied for every rank, or one for each.
        case: The window.
        ranks: The micro-batches of every data-parallel rank.
        context: Ranks that share each sequence.
        estimate: Of the whole window; by default every rank makes that of whole prompt groups.
    """
    plan = list(ranks)
    world = len(plan) * context
    own = copies(objective, world) if isinstance(objective, Objective) else list(objective)
    if estimate is None:
        ids = case.group_ids.unique()
        for rank, held in enumerate(own):
            mine = ids[rank // context :: len(plan)]
            rows = torch.isin(case.group_ids, mine).nonzero().flatten()
            if len(mine):
                part = held.estimator.estimate(case.rollouts(rows))
                estimate = part.new_zeros(case.count, *part.shape[1:]) if estimate is None else estimate
                estimate[rows] = part
    assert estimate is not None
    everything = estimate

    def one(communicator: ThreadCommunicator) -> Outcome:
        place, part = divmod(communicator.rank, context)
        return run_window(
            own[communicator.rank], case, plan[place], everything, communicator, (part, context)
        )

    return run_ranks_as_threads(one, world, context)


def copies(objective: Objective, count: int) -> list[Objective]:
    """An objective per rank, as every process has its own; the same one where a part cannot be copied."""
    try:
        return [copy.deepcopy(objective) for _ in range(count)]
    except Exception:  # noqa: BLE001  # a law of its own says so
        return [objective] * count


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
