"""A rank that fails where others wait for it in a collective ends all of them, with its words."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rlobjectives import (
    GRPO,
    Capabilities,
    Communicator,
    Objective,
    PaddedLayout,
    PolicyLoss,
    RankError,
    Stat,
    Sum,
    TokenBatch,
    TokenLoss,
    WindowContext,
    ends_together,
)
from rlobjectives.distributed.ending import is_lost
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


class Summing(PolicyLoss):
    """Adds up over the ranks that share a sequence; one of them fails before, in its loss or its statistics."""

    capabilities = Capabilities(needs_prepass=True)
    window_statistics = {"length": Sum}

    def __init__(self, failing: int, where: str) -> None:
        self.failing, self.where = failing, where

    def lengths(self, tokens: TokenBatch, context: WindowContext, where: str) -> Tensor:
        if dist.get_rank() == self.failing and where == self.where:
            raise ZeroDivisionError("no such ratio")
        return context.context_sum(tokens.layout.local_counts())

    def statistics(self, tokens: TokenBatch, context: WindowContext) -> dict[str, Stat]:
        return {"length": Sum.of(self.lengths(tokens, context, "statistics"))}

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        slope = tokens.layout.expand(self.lengths(tokens, context, "loss"))
        return TokenLoss(slope * tokens.logprobs, slope)

    may_differ = frozenset({"failing", "where"})


def shared_sequences(out: str, failing: int, stays: bool, where: str) -> str:
    """Two ranks that hold half of each sequence."""

    def work() -> None:
        communicator = Communicator.world(context_group=dist.new_group([0, 1]))
        layout = LAYOUT.with_facts(total_tokens=torch.full((2,), 6.0, dtype=torch.float64))
        tokens = TokenBatch(logprobs=-torch.ones(2, 3), layout=layout)
        builder = Objective(estimator=GRPO(), policy_loss=Summing(failing, where)).window(communicator)
        with builder.guard():
            if dist.get_rank() == failing and where == "adding":
                raise ZeroDivisionError("no such ratio")
            builder.add(estimate=ESTIMATE, layout=layout)
            builder.add_prepass(tokens)
        window = builder.freeze()
        output = window.loss(tokens.replace(advantages=window.advantages(ESTIMATE, layout)))
        window.summarize([output])

    return ended(work, failing, out, stays=stays)


def run(
    function: Callable[..., Any], tmp_path: Path, failing: int, *more: object, stays: bool
) -> RankFailure:
    with pytest.raises(RankFailure) as failure:
        run_ranks(function, 2, str(tmp_path), failing, stays, *more, timeout=LIMIT, fresh=True)
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


@pytest.mark.parametrize("where", ["loss", "statistics", "adding"])
def test_ranks_that_share_sequences_do_not_wait_for_one_that_failed(where: str, tmp_path: Path) -> None:
    error = run(shared_sequences, tmp_path, 1, where, stays=False).errors[0]
    assert isinstance(error, RankError)
    assert "rank 1 stopped with ZeroDivisionError: no such ratio" in str(error)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:17",
            True,
        ),
        ("Gloo connectFullMesh failed with [.../transport/tcp/pair.cc:144] no error", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:2251, ncclRemoteError", True),
        ("sandbox: socket timed out", False),
        ("the reward server said: connection reset by peer, broken pipe", False),
        ("a gloomy answer", False),
    ],
)
def test_a_lost_peer_is_told_from_a_lost_connection_of_a_user(text: str, lost: bool) -> None:
    assert is_lost(RuntimeError(text)) is lost
    assert not is_lost(ValueError(text))


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


def listeners() -> list[int]:
    """Threads that still listen, right after each of many stretches of code; one that outlives Python aborts the process."""
    found = []
    for _ in range(20):
        with ends_together():
            time.sleep(0.01)
        found.append(sum(thread.name == "rlobjectives-watch" for thread in threading.enumerate()))
    return found


def test_nothing_listens_when_the_code_has_ended() -> None:
    assert run_ranks(listeners, 2) == [[0] * 20] * 2


def test_in_a_single_process_it_does_nothing() -> None:
    with pytest.raises(ZeroDivisionError), ends_together():
        raise ZeroDivisionError
