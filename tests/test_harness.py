"""The multi-process harness keeps its word: rank order, limits, tracebacks, and life after a failure."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks


@dataclass
class Answer:
    """A class of this module must survive the way there and back."""

    rank: int
    total: torch.Tensor


class Unpicklable(Exception):
    def __init__(self, handle: object) -> None:
        super().__init__("holds a handle")
        self.handle = handle


def add_up(offset: Answer) -> Answer:
    rank = dist.get_rank()
    if rank == 0:
        time.sleep(0.2)  # rank 1 answers first
    total = torch.tensor([float(rank + offset.rank)])
    dist.all_reduce(total)
    return Answer(rank, total)


def draw() -> float:
    return float(torch.rand(()))


def process() -> int:
    return os.getpid()


def raise_on_one() -> str:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 dislikes its data")
    return "fine"


def raise_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("gone before the collective")
    dist.all_reduce(torch.zeros(1))


def raise_unpicklable() -> None:
    raise Unpicklable(lambda: None)


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        sleep_for_ever()


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def loaded() -> set[str]:
    return {"conftest", "lightning", "transformers", "hypothesis"} & {*sys.modules}


def test_results_come_back_in_rank_order():
    answers = run_ranks(add_up, 2, Answer(10, torch.zeros(1)))
    assert [answer.rank for answer in answers] == [0, 1]
    assert [answer.total.item() for answer in answers] == [21.0, 21.0]


def test_four_ranks():
    assert [answer.total.item() for answer in run_ranks(add_up, 4, Answer(0, torch.zeros(1)))] == [6.0] * 4


def test_processes_are_kept_and_seeded_anew():
    assert run_ranks(process, 2) == run_ranks(process, 2)
    assert len({*run_ranks(draw, 2), *run_ranks(draw, 2)}) == 1


def test_fresh_processes_serve_one_call():
    assert not {*run_ranks(process, 2, fresh=True)} & {*run_ranks(process, 2)}


def test_a_raising_rank_is_reported_with_its_traceback():
    with pytest.raises(
        RankFailure, match=r"(?s)raise_on_one raised on rank 1.*in raise_on_one.*dislikes"
    ) as caught:
        run_ranks(raise_on_one, 2)
    assert [*caught.value.errors] == [1]
    assert isinstance(caught.value.errors[1], ValueError)


def test_expected_errors_come_back_as_results_and_the_ranks_live_on():
    before = run_ranks(process, 2)
    fine, error = run_ranks(raise_on_one, 2, expect_errors=True)
    assert fine == "fine"
    assert "in raise_on_one" in error.rank_traceback
    assert isinstance(error, ValueError)
    assert run_ranks(process, 2) == before
    assert run_ranks(add_up, 2, Answer(0, torch.zeros(1)))[0].total.item() == 1.0


def test_an_exception_that_cannot_travel_is_still_told():
    with pytest.raises(RankFailure, match="Unpicklable: holds a handle"):
        run_ranks(raise_unpicklable, 2)


def test_a_hung_rank_fails_within_the_limit_and_shows_its_stack():
    run_ranks(process, 2)  # start-up does not count
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)hung on rank 1 of 2.*in sleep_for_ever.*in hang_on_one"):
        run_ranks(hang_on_one, 2, timeout=2.0)
    assert time.monotonic() - begin < 10.0
    assert run_ranks(add_up, 2, Answer(0, torch.zeros(1)))[0].total.item() == 1.0


def test_ranks_that_wait_for_a_failed_one_do_not_hide_its_error(monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE", 1.0)
    with pytest.raises(
        RankFailure, match=r"(?s)hangs here.*all_reduce.*rank 0 raised.*gone before the collective"
    ):
        run_ranks(raise_while_others_wait, 2)


def test_a_dead_rank_is_reported_at_once():
    with pytest.raises(RankFailure, match="rank 1 died with exit code 7 in die_on_one"):
        run_ranks(die_on_one, 2)


def test_start_up_is_light():
    assert run_ranks(loaded, 2, fresh=True) == [set(), set()]


def test_a_local_function_is_refused():
    with pytest.raises(ValueError, match="module-level function"):
        run_ranks(lambda: None, 2)
