"""Pipeline stages on real ranks: two stages, two pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlobjectives import M2PO, P3O, NonFiniteError, Objective, RankError
from rlobjectives.distributed import PipelineCommunicator
from tests.losses.offpolicy import Data, Given, run
from tests.ranks import run_ranks

STAGES = 2
OBJECTIVES = {"p3o": P3O(), "m2po": M2PO(budget=0.3, mode="clip_waterfill", floor_low=0.0, floor_high=0.0)}


def build(name: str) -> Objective:
    return Objective(estimator=Given(), policy_loss=OBJECTIVES[name])


def communicator() -> PipelineCommunicator:
    """Ranks 0 and 1 are the first stage, 2 and 3 the last; pipelines are (0, 2) and (1, 3)."""
    rank = dist.get_rank()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return PipelineCommunicator(stages[rank // 2], pipelines[rank % 2])


def stage(name: str, shares: list[Data], fault: str | None = None) -> Any:
    rank, objective, ranks = dist.get_rank(), build(name), communicator()
    if fault == "first" and rank == 1:
        builder = objective.window(ranks)
        with builder.guard():
            raise KeyError("a first stage failed")
        return builder.freeze()
    if not ranks.is_last_stage:
        if fault == "schema" and rank == 0:
            objective = Objective(estimator=Given())
        window = objective.window(ranks).freeze()
        statistics = {key: stat.row for key, stat in window._statistics.items()}
        return window.empty, window.micro_batches, statistics, window.summarize([])
    data = shares[rank - 2]
    if fault == "values" and rank == 3:
        data.columns["logprobs"] = torch.full_like(data.columns["logprobs"], float("nan"))
    return run(objective, [data.rows([row]) for row in range(len(data.advantages))], ranks)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_statistics_of_the_last_stage_reach_the_first(name):
    data = Data.random([4, 1, 3, 6, 2], seed=5)
    whole = run(build(name), [data])
    results = run_ranks(stage, 4, name, [data.rows([0, 1, 2]), data.rows([3, 4])])
    last = results[2:]
    torch.testing.assert_close(
        torch.cat([one.gradient for one in last]), whole.gradient, rtol=1e-12, atol=1e-12
    )
    for result in last:
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-12)
    for empty, micro_batches, statistics, metrics in results[:2]:
        assert (empty, micro_batches) == (False, 3)
        assert float(statistics["window/tokens"]) == 16.0
        assert any(key.startswith("policy_loss/") for key in statistics)
        for key, row in results[0][2].items():
            assert torch.equal(statistics[key], row)
        assert metrics == last[0].metrics


@pytest.mark.parametrize(
    ("fault", "speaker"), [("first", "rank 1"), ("values", "rank 3"), ("schema", "rank 0")]
)
def test_an_error_on_any_stage_is_raised_on_every_rank(fault, speaker):
    data = Data.random([4, 1, 3, 6, 2], seed=5)
    shares = [data.rows([0, 1, 2]), data.rows([3, 4])]
    results = run_ranks(stage, 4, "p3o", shares, fault, expect_errors=True)
    for rank, error in enumerate(results):
        if fault == "first" and rank == 1:
            assert isinstance(error, KeyError)
            continue
        assert isinstance(error, NonFiniteError if fault == "values" else RankError), error
        assert speaker in str(error)


def test_all_stages_know_an_empty_window():
    data = Data.random([2, 3])
    data.mask = torch.zeros_like(data.mask)
    results = run_ranks(stage, 4, "p3o", [data, data])
    assert [one[0] for one in results[:2]] == [True, True]
