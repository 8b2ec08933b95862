"""A rank that fails where others wait for it in a collective ends all of them, with its words."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rlobjectives import GRPO, Objective, PaddedLayout, RankError, TokenBatch, ends_together
from tests.ranks import RankFailure, run_ranks

LAYOUT = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
ESTIMATE = torch.tensor([1.0, -1.0], dtype=torch.float64)
LIMIT = 60.0  # generous on a busy machine; a hang would last for the group's time-out of ten minutes


def train(*, failing: int, losses: int = 2) -> None:
    """Two micro-batches of a window under DDP; in the second, one rank has no memory for its forward."""
    policy = DistributedDataParallel(torch.nn.Linear(4, 1))
    window = Objective(estimator=GRPO()).freeze([(ESTIMATE, LAYOUT)] * 2)
    outputs = []
    for turn in range(2):
        with window.guard():
            if dist.get_rank() == failing and turn == 1:
                if losses == 2:
                    raise torch.OutOfMemoryError("tried to allocate 7 GiB")
                break
            logprobs = policy(torch.ones(2, 3, 4)).squeeze(-1)
            advantages = window.advantages(ESTIMATE, LAYOUT)
            outputs.append(window.loss(TokenBatch(logprobs=logprobs, layout=LAYOUT, advantages=advantages)))
            outputs[-1].loss.backward()
    window.summarize(outputs)


def ended(work: Callable[[], Any], failing: int, out: str, *, stays: bool) -> str:
    """Run it as a program would: whoever fails leaves, unless it stays alive."""
    sys.stderr = Path(out, f"stderr-{dist.get_rank()}").open("w")  # noqa: SIM115  # for the rest of the process
    began = time.monotonic()
    try:
        work()
    except BaseException as error:
        Path(out, f"error-{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        Path(out, f"seconds-{dist.get_rank()}").write_text(str(time.monotonic() - began))
        if dist.get_rank() == failing and not stays:
            os._exit(3)
        raise
    return "nothing"


def forward(out: str, failing: int, stays: bool) -> str:
    return ended(lambda: train(failing=failing), failing, out, stays=stays)


def missing_loss(out: str, failing: int, stays: bool) -> str:
    return ended(lambda: train(failing=failing, losses=1), failing, out, stays=stays)


def outer(out: str, failing: int, stays: bool) -> str:
    """One context around everything, and a collective that no part of this package sees."""

    def work() -> None:
        with ends_together():
            if dist.get_rank() == failing:
                raise LookupError("no reward for this answer")
            dist.all_reduce(torch.ones(3))

    return ended(work, failing, out, stays=stays)


def run(function: Callable[..., Any], tmp_path: Path, failing: int, *, stays: bool) -> RankFailure:
    with pytest.raises(RankFailure) as failure:
        run_ranks(function, 2, str(tmp_path), failing, stays, timeout=LIMIT, fresh=True)
    return failure.value


@pytest.mark.parametrize("failing", [0, 1])  # rank 0 often keeps the store that the words go through
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (forward, "OutOfMemoryError: tried to allocate 7 GiB"),
        (missing_loss, "handed over 1 of its 2 micro-batches"),
        (outer, "LookupError: no reward for this answer"),
    ],
)
def test_the_others_hear_why(function: Callable[..., Any], words: str, failing: int, tmp_path: Path) -> None:
    failure = run(function, tmp_path, failing, stays=False)
    error = failure.errors[1 - failing]
    assert isinstance(error, RankError), failure
    assert f"rank {failing} stopped with " in str(error)
    assert words in str(error)
    assert words in (tmp_path / f"error-{failing}").read_text()


def test_nobody_waits_for_a_failed_rank_that_stays_alive(tmp_path: Path) -> None:
    failure = run(forward, tmp_path, 1, stays=True)
    assert "rank 0 died with exit code 1" in str(failure)
    said = (tmp_path / "stderr-0").read_text()
    assert "RankError on rank 0: rank 1 stopped with OutOfMemoryError: tried to allocate 7 GiB" in said


def gone(out: str, failing: int, stays: bool) -> str:
    """A rank that is killed has no time for words."""

    def work() -> None:
        with ends_together():
            if dist.get_rank() == failing:
                os._exit(9)
            dist.all_reduce(torch.ones(3))

    return ended(work, failing, out, stays=stays)


def test_a_rank_that_is_gone_without_a_word(tmp_path: Path) -> None:
    error = run(gone, tmp_path, 1, stays=False).errors[0]
    assert isinstance(error, RankError)
    assert "another rank is gone without a word" in str(error)


def refuse_and_go_on() -> list[str]:
    """What ended one run of a process does not end the next."""
    from rlobjectives.distributed.ending import watched

    found = []
    for run_number in range(2):
        try:
            with watched(new_run=True), ends_together():
                if run_number == 0:
                    raise ValueError("refused on all ranks")
                dist.all_reduce(torch.ones(1))
                found.append("went on")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_ended_one_run_does_not_end_the_next() -> None:
    assert run_ranks(refuse_and_go_on, 2, fresh=True) == [["refused on all ranks", "went on"]] * 2


def test_in_a_single_process_it_does_nothing() -> None:
    with pytest.raises(ZeroDivisionError), ends_together():
        raise ZeroDivisionError
