"""P3O, M2PO and corrections on real ranks: any grid gives the one-process answer, and errors reach everybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlobjectives import (
    GDPO,
    M2PO,
    OPSM,
    P3O,
    Communicator,
    ImportanceCorrection,
    KLCov,
    KLPenalty,
    NonFiniteError,
    Objective,
    RankError,
    Rejection,
    Rollouts,
    SequenceMean,
)
from tests.losses.offpolicy import Data, Given, Result, run
from tests.ranks import run_ranks

BARE = {"floor_low": 0.0, "floor_high": 0.0}
PARTS: dict[str, dict[str, Any]] = {
    "p3o": {"policy_loss": P3O(), "kl": KLPenalty(coef=0.1)},
    "p3o_sequence": {"policy_loss": P3O(ess_scope="sequence")},
    "m2po_released": {"policy_loss": M2PO(budget=0.3, **BARE)},
    "m2po_waterfill": {"policy_loss": M2PO(budget=0.3, mode="clip_waterfill", **BARE)},
    "m2po_mask": {"policy_loss": M2PO(budget=0.3, mode="mask", denominator="kept")},
    "kl_cov": {"policy_loss": KLCov(fraction=0.2)},
    "icepop_kept": {
        "correction": ImportanceCorrection(
            low=0.6, high=1.6, outside="mask", denominator="kept", normalize=True
        ),
        "reduction": SequenceMean(),
    },
    "rejection": {
        "correction": ImportanceCorrection(weight="sequence", reject=(Rejection(over="mean", high=1.4),))
    },
    "opsm_kept": {"off_policy_mask": OPSM(threshold=0.0, denominator="kept")},
}
COLLECTIVES = {
    "p3o": 1,
    "p3o_sequence": 1,
    "m2po_released": 3,
    "m2po_waterfill": 3,
    "m2po_mask": 4,
    "kl_cov": 4,
    "icepop_kept": 2,
    "rejection": 1,
    "opsm_kept": 1,
}
LENGTHS = [4, 1, 3, 6, 2, 5, 1]
GRIDS = [
    (1, 1, [[[0, 1], [2, 3, 4], [5, 6]]]),
    (2, 1, [[[0, 1], [2], [3]], [[4, 5, 6]]]),
    (2, 1, [[[0, 1, 2, 3], [4, 5, 6]], []]),
    (4, 1, [[[0]], [[1], [2]], [], [[3, 4], [5, 6]]]),
    (2, 2, [[[0, 1, 2], [3, 4, 5, 6]]]),
    (4, 2, [[[0, 1], [2]], [[3, 4, 5, 6]]]),
]


class Counting(Communicator):
    """Counts its exchanges."""

    exchanges = 0

    def gather(self, row: Tensor) -> Tensor:
        self.exchanges += 1
        return super().gather(row)


def build(name: str, estimator: Any = None) -> Objective:
    return Objective(estimator=estimator or Given(), **PARTS[name])


def communicator(context_size: int) -> Counting:
    context = None
    if context_size > 1:
        for start in range(0, dist.get_world_size(), context_size):
            group = dist.new_group(list(range(start, start + context_size)))
            if dist.get_rank() in range(start, start + context_size):
                context = group
    return Counting(dist.group.WORLD, context_group=context)


def one_rank(
    name: str, data: Data, cuts: list[list[list[int]]], context_size: int
) -> tuple[Result, list[int]]:
    """This rank's share, padded with dummies to the number of micro-batches of the busiest rank."""
    ranks = communicator(context_size)
    mine = cuts[dist.get_rank() // context_size]
    most = max(map(len, cuts))
    pieces = [data.rows(rows) for rows in mine]
    pieces += [data.rows([0]).dummy()] * (most - len(mine))
    if context_size > 1:
        pieces = [piece.shard(dist.get_rank() % context_size, context_size) for piece in pieces]
    counted = [True] * len(mine) + [False] * (most - len(mine))
    result = run(build(name), pieces, ranks, counted=counted, totals=None if context_size == 1 else True)
    result.collectives = ranks.exchanges - 1  # the last one is that of the metrics
    return result, [row for rows in mine for row in rows]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}ranks_cp{grid[1]}_{len(grid[2])}")
def test_any_grid_gives_the_answer_of_one_process(name, grid):
    world, context_size, cuts = grid
    data = Data.random(LENGTHS, seed=5)
    whole = run(build(name), [data])
    results = run_ranks(one_rank, world, name, data, cuts, context_size)
    loss = sum(result.loss for result, _ in results)
    torch.testing.assert_close(loss, whole.loss, rtol=1e-12, atol=1e-12)
    expected = whole.gradient.view(data.mask.shape)
    found = torch.zeros_like(expected)
    width = -(-data.mask.shape[1] // context_size)
    for rank, (result, rows) in enumerate(results):
        gradient = result.gradient.view(-1, width)
        assert torch.equal(gradient[len(rows) :], torch.zeros_like(gradient[len(rows) :]))
        start = rank % context_size * width
        found[rows, start : start + width] += gradient[: len(rows)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for result, _ in results:
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-11, abs=1e-12)
        assert result.collectives == COLLECTIVES[name]
        assert result.metrics == results[0][0].metrics


def late_rank(data: Data, estimate: Tensor, cuts: list[list[list[int]]]) -> tuple[Result, list[int]]:
    ranks = communicator(1)
    data.advantages = estimate
    mine = cuts[dist.get_rank()]
    result = run(build("m2po_waterfill", GDPO(weights=(1.0, 0.5))), [data.rows(rows) for rows in mine], ranks)
    result.collectives = ranks.exchanges - 1
    return result, [row for rows in mine for row in rows]


def test_m2po_after_whitening_takes_a_fourth_collective():
    data = Data.random(LENGTHS, seed=5)
    rewards = torch.rand(7, 2, generator=torch.Generator().manual_seed(0))
    objective = build("m2po_waterfill", GDPO(weights=(1.0, 0.5)))
    groups = torch.zeros(7, dtype=torch.long)
    estimate = objective.estimator.estimate(Rollouts(rewards=rewards, group_ids=groups))
    data.advantages = estimate
    whole = run(objective, [data])
    cuts = [[[0, 1], [2]], [[3, 4], [5, 6]]]
    results = run_ranks(late_rank, 2, data, estimate, cuts)
    found = torch.zeros_like(whole.gradient.view(data.mask.shape))
    for result, rows in results:
        found[rows] = result.gradient.view(-1, data.mask.shape[1])
        assert result.collectives == 4
    torch.testing.assert_close(found.flatten(), whole.gradient, rtol=1e-12, atol=1e-12)


def bad_rank(name: str, data: Data, column: str) -> None:
    if dist.get_rank() == 1:
        data.columns[column] = torch.where(data.mask, float("inf"), data.columns[column])
    run(build(name), [data], communicator(1))


@pytest.mark.parametrize("name", ["p3o", "m2po_released"])
@pytest.mark.parametrize("world", [2, 4])
def test_one_non_finite_rank_stops_all(name, world):
    column = "behavior_logprobs" if name == "p3o" else "old_logprobs"
    data = Data.random(LENGTHS, seed=5)
    results = run_ranks(bad_rank, world, name, data, column, expect_errors=True)
    for error in results:
        assert isinstance(error, NonFiniteError)
        assert f"rank 1, micro-batch 0: {column} has 22 non-finite" in str(error)
        assert f"Raised on all {world} ranks." in str(error)


def missing_rank(name: str, data: Data) -> None:
    if dist.get_rank() == 0:
        del data.columns["behavior_logprobs"]
    run(build(name), [data], communicator(1))


def test_a_missing_column_on_one_rank_stops_all():
    results = run_ranks(missing_rank, 2, "p3o", Data.random(LENGTHS, seed=5), expect_errors=True)
    assert "behavior_logprobs" in str(results[0])
    assert isinstance(results[1], RankError)


def empty_rank(name: str, data: Data) -> tuple[bool, float, bool]:
    objective = build(name)
    builder = objective.window(communicator(1))
    layout = data.layout()
    builder.add(estimate=data.advantages, layout=layout)
    leaf = data.columns["logprobs"].clone().requires_grad_()
    builder.add_prepass(data.tokens(layout, leaf.detach()))
    window = builder.freeze()
    output = window.loss(data.tokens(layout, leaf, advantages=window.advantages(data.advantages, layout)))
    output.loss.backward()
    assert leaf.grad is not None
    return window.empty, float(output.loss.detach()), bool((leaf.grad == 0).all())


@pytest.mark.parametrize("name", ["p3o", "m2po_released", "m2po_mask"])
def test_no_token_anywhere_is_an_empty_window_on_all_ranks(name):
    data = Data.random([2, 3])
    data.mask = torch.zeros_like(data.mask)
    assert run_ranks(empty_rank, 2, name, data) == [(True, 0.0, True)] * 2
