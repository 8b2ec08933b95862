"""The laws on real gloo processes: uneven, empty and idle shards, context parallelism, one rank broken.

Ranks start once and run every check of a world size; what each check saw comes back to be asserted here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlobjectives import (
    GDPO,
    GRPO,
    Communicator,
    FixedBudget,
    GradientScale,
    KLPenalty,
    Mean,
    Moments,
    NonFiniteError,
    Objective,
    RankError,
    SequenceMean,
    ShapeError,
    Sum,
    TokenMean,
    synchronize,
)
from rlobjectives.distributed import full_token_counts
from rlobjectives.testing.cases import MicroBatch, Shard, draw_case
from rlobjectives.testing.compare import assert_same
from rlobjectives.testing.simulate import Outcome, run_window, together, whole
from tests.ranks import run_ranks

CASE = draw_case(40, (3, 4, 2, 5), width=6, empty_rows=0.2)
SHARDS: dict[int, list[list[MicroBatch]]] = {
    2: [
        [MicroBatch((0, 9, 3), Shard(packed=True)), MicroBatch(()), MicroBatch((13, 1), Shard(extra=3))],
        [MicroBatch((2, 4, 5, 6, 7, 8, 10, 11, 12))],
    ],
    4: [
        [MicroBatch((0,)), MicroBatch((9, 3), Shard(packed=True))],
        [],
        [MicroBatch((2, 4, 5, 6, 7, 8, 10, 11, 12, 13), Shard(extra=1)), MicroBatch(()), MicroBatch((1,))],
        [MicroBatch((), Shard(packed=True))],
    ],
}
"""Micro-batches of each rank: uneven, empty, and none at all."""

OBJECTIVES = {
    "gdpo": Objective(estimator=GDPO(), kl=KLPenalty(coef=0.1), entropy_coef=0.01),
    "grpo": Objective(estimator=GRPO(scale="batch"), reduction=SequenceMean()),
    "dr_grpo": Objective(estimator=GRPO(scale="none"), reduction=FixedBudget(max_tokens=9)),
}


class Counting(Communicator):
    """Real ranks, counted exchanges."""

    collectives = 0

    def gather(self, row: Tensor) -> Tensor:
        self.collectives += 1
        return super().gather(row)


@dataclass
class Seen:
    """What one rank saw of one window."""

    outcome: Outcome
    rows: list[float]


def run_grid(name: str, context: int) -> Seen:
    """This rank's share of a window on a data × context grid over all ranks."""
    objective, rank, world = OBJECTIVES[name], dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([*range(first, first + context)]) for first in range(0, world, context)]
    place, part = divmod(rank, context)
    communicator = Counting(dist.group.WORLD, context_group=groups[place] if context > 1 else None)
    estimate = objective.estimator.estimate(CASE.rollouts())
    shards = SHARDS[world // context] if world > context else [[MicroBatch(tuple(range(CASE.count)))]]
    outcome = run_window(objective, CASE, shards[place], estimate, communicator, (part, context))
    return Seen(outcome, synchronized_row(communicator))


def synchronized_row(communicator: Communicator) -> list[float]:
    """Sums that are not associative in floating point: equal on all ranks only if folded in one order."""
    generator = torch.Generator().manual_seed(communicator.rank)
    values = torch.randn(1000, generator=generator, dtype=torch.float64) * 10.0 ** (4 * communicator.rank)
    found = synchronize(
        {"sum": Sum.of(values), "mean": Mean.of(values), "moments": Moments.of(values)}, communicator
    )
    return [number for stat in found.values() for number in stat.row.tolist()]


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize(("world", "context"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_every_grid_gives_the_window_of_one_process(name: str, world: int, context: int) -> None:
    seen = run_ranks(run_grid, world, name, context)
    found = together([one.outcome for one in seen])  # asserts that metrics are equal on all ranks
    assert_same(found, whole(OBJECTIVES[name], CASE), 1e-12)
    assert found.collectives == [2] * world  # one to open the window, one to report
    assert all(one.rows == seen[0].rows for one in seen)  # bit by bit


def token_counts_of_shards() -> list[float]:
    communicator = Communicator.world(context_group=dist.group.WORLD)
    return full_token_counts(torch.tensor([1.0, 0.0, 3.0 * communicator.rank]), communicator).tolist()


def test_whole_lengths_are_known_from_shards() -> None:
    assert run_ranks(token_counts_of_shards, 2) == [[2.0, 0.0, 3.0]] * 2


def first_of_context_counts() -> bool:
    return Communicator.world(context_group=dist.group.WORLD).owns_sequences


def test_the_first_context_rank_counts_sequences() -> None:
    assert run_ranks(first_of_context_counts, 2) == [True, False]


def break_one(how: str) -> None:
    """Rank 1 goes wrong in some way before the window opens; nobody may hang."""
    objective, communicator = OBJECTIVES["gdpo"], Communicator.world()
    broken = communicator.rank == 1
    if how == "schema" and broken:
        objective = OBJECTIVES["grpo"]
    estimate = objective.estimator.estimate(CASE.rollouts()).clone()
    if how == "estimate" and broken:
        estimate[0] = torch.nan
    rows = torch.arange(CASE.count)
    builder = objective.window(communicator)
    with builder.guard():
        if how == "exception" and broken:
            raise ZeroDivisionError("rank 1 dislikes its data")
        builder.add(
            estimate=estimate[1:] if how == "shape" and broken else estimate, layout=CASE.arrange(rows)
        )
    builder.freeze()


@pytest.mark.parametrize(
    ("how", "own", "others", "message"),
    [
        (
            "exception",
            ZeroDivisionError,
            RankError,
            "rank 1 stopped with ZeroDivisionError: rank 1 dislikes its data.",
        ),
        ("shape", ShapeError, RankError, "rank 1 stopped with ShapeError: GDPO estimate has shape"),
        (
            "estimate",
            NonFiniteError,
            NonFiniteError,
            "rank 1, micro-batch 0: estimate has 3 non-finite values",
        ),
        ("schema", RankError, RankError, "columns of a rollout ({others} / rank 1): "),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_one_broken_rank_stops_all_at_the_same_point(
    how: str, own: type, others: type, message: str, world: int
) -> None:
    run_ranks(first_of_context_counts, world)  # start-up does not count
    begin = time.monotonic()
    errors = run_ranks(break_one, world, how, expect_errors=True, timeout=30.0)
    assert time.monotonic() - begin < 20.0
    expected = message.format(others="rank 0" if world == 2 else "ranks 0, 2, 3")
    for rank, error in enumerate(errors):
        assert isinstance(error, own if rank == 1 else others), error
        if rank != 1:
            assert expected in str(error)
            assert f"Raised on all {world} ranks" in str(error)


def report_nan() -> None:
    """A log-probability goes wrong on one rank after the window has opened."""
    objective, communicator = OBJECTIVES["grpo"], Communicator.world()
    case = CASE
    if communicator.rank == 1:
        row, place = CASE.mask.nonzero()[0].tolist()
        logprobs = CASE.columns["logprobs"].clone()
        logprobs[row, place] = torch.nan
        case = CASE.replaced(logprobs=logprobs)
    estimate = objective.estimator.estimate(CASE.rollouts())
    run_window(objective, case, [MicroBatch(tuple(range(CASE.count)))], estimate, communicator)


def test_a_non_finite_logprob_is_reported_on_all_ranks() -> None:
    for error in run_ranks(report_nan, 2, expect_errors=True):
        assert isinstance(error, NonFiniteError)
        assert "rank 1, micro-batch 0: logprobs has 1 non-finite values among" in str(error)


def train_with_ddp() -> tuple[list[float], float]:
    """One step of a linear policy under DDP, which averages gradients over ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).double())
    objective = Objective(estimator=GRPO(), reduction=TokenMean())
    rows = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]][rank] if rank == 0 else [5])
    features = torch.linspace(-1, 1, 30, dtype=torch.float64).view(10, 1, 3)[rows]
    layout, scale = (
        CASE.arrange(rows).with_mask(torch.ones(len(rows), 6, dtype=torch.bool)),
        GradientScale.for_ddp(),
    )
    estimate = torch.linspace(-1, 1, 10, dtype=torch.float64)[rows]
    window = objective.freeze([(estimate, layout)], Communicator.world())
    logprobs = policy(features).squeeze(-1).expand(-1, 6)
    from rlobjectives import TokenBatch

    output = window.loss(
        TokenBatch(logprobs=logprobs, advantages=window.advantages(estimate, layout), layout=layout)
    )
    (output.loss * scale.factor).backward()
    gradient = [number for one in policy.parameters() for number in one.grad.flatten().tolist()]
    return gradient, window.summarize([output])["loss/total"]


def test_ddp_with_its_scale_gives_the_gradient_of_the_whole_window() -> None:
    (first, loss), (second, other) = run_ranks(train_with_ddp, 2)
    assert (first, loss) == (second, other)
    torch.manual_seed(0)
    policy = torch.nn.Linear(3, 1).double()
    rows = [0, 1, 2, 3, 4, 5]
    features = torch.linspace(-1, 1, 30, dtype=torch.float64).view(10, 1, 3)[rows]
    advantages = torch.linspace(-1, 1, 10, dtype=torch.float64)[rows].unsqueeze(1)
    logprobs = policy(features).squeeze(-1).expand(-1, 6)
    expected = (-advantages * (logprobs - logprobs.detach()).exp()).mean()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    gradient = [number for one in policy.parameters() for number in one.grad.flatten().tolist()]
    assert first == pytest.approx(gradient, rel=1e-12)


@pytest.mark.parametrize(
    "bad", [{"averaged_ranks": 0}, {"accumulation_divisor": True}, {"averaged_ranks": 2.0}]
)
def test_a_gradient_scale_is_made_of_positive_integers(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is"):
        GradientScale(**bad)


def test_gradient_scales() -> None:
    assert GradientScale().factor == 1
    assert GradientScale.for_ddp(8).factor == 8
    assert GradientScale.for_ddp().factor == 1  # no process group
    assert GradientScale(averaged_ranks=4, accumulation_divisor=3).factor == 12
