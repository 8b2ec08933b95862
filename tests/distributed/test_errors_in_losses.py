"""What goes wrong on one rank after a window has opened is raised on all, with its words, while backwards stay in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rlobjectives import (
    GRPO,
    Communicator,
    Objective,
    PaddedLayout,
    PolicyLoss,
    RankError,
    ShapeError,
    TokenBatch,
    TokenLoss,
)
from rlobjectives.distributed import Fault, raised_together
from tests.ranks import run_ranks

LAYOUT = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
ESTIMATE = torch.tensor([1.0, -1.0], dtype=torch.float64)


class Fragile(PolicyLoss):
    """Goes wrong on rank 1, in one way or another."""

    def __init__(self, how: str) -> None:
        self.how = how

    def value_and_slope(self, tokens: TokenBatch, context: Any) -> TokenLoss:
        broken = dist.get_rank() == 1
        if broken and self.how == "exception":
            raise ZeroDivisionError("no such ratio")
        slope = tokens.logprobs[:1] if broken and self.how == "shape" else tokens.logprobs
        return TokenLoss(tokens.logprobs, slope)


def opened(how: str) -> Any:
    objective = Objective(estimator=GRPO(), policy_loss=Fragile(how))
    return objective, objective.freeze([(ESTIMATE, LAYOUT)] * 2)


def tokens(window: Any, logprobs: Tensor) -> TokenBatch:
    return TokenBatch(logprobs=logprobs, layout=LAYOUT, advantages=window.advantages(ESTIMATE, LAYOUT))


def train(how: str) -> None:
    """Two micro-batches under DDP, each of whose backwards waits for all ranks."""
    torch.manual_seed(0)
    policy = DistributedDataParallel(torch.nn.Linear(4, 1))
    objective, window = opened(how)
    outputs = []
    for _ in range(2):
        logprobs = policy(torch.ones(2, 3, 4)).squeeze(-1)
        outputs.append(window.loss(tokens(window, logprobs)))
        outputs[-1].loss.backward()
        assert policy.module.weight.grad is not None
        assert bool(policy.module.weight.grad.isfinite().all())
    if how == "exception":
        window.summarize(outputs)
    objective.window().freeze()  # what nobody has asked for yet is raised here


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("exception", ZeroDivisionError, "rank 1 stopped with ZeroDivisionError: no such ratio."),
        ("shape", ShapeError, "rank 1 stopped with ShapeError: Fragile slope has shape"),
    ],
)
def test_a_loss_that_fails_on_one_rank_is_raised_on_all(how: str, kind: type, words: str) -> None:
    first, second = run_ranks(train, 2, how, expect_errors=True)
    assert type(second) is kind
    assert isinstance(first, RankError)
    assert words in str(first)


def stop_while_collecting(how: str) -> None:
    builder = Objective(estimator=GRPO()).window()
    with builder.guard():
        if dist.get_rank() == 1:
            raise KeyboardInterrupt if how == "interrupt" else SystemExit(3)
    builder.freeze()


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [("interrupt", KeyboardInterrupt, "KeyboardInterrupt."), ("exit", SystemExit, "SystemExit: 3.")],
)
def test_an_interrupt_is_told_to_the_others(how: str, kind: type, words: str) -> None:
    first, second = run_ranks(stop_while_collecting, 2, how, expect_errors=True)
    assert isinstance(first, RankError)
    assert f"rank 1 stopped with {words}" in str(first)
    assert kind.__name__ in f"{type(second).__name__}{second}"


def leave_out_what_is_empty() -> float:
    """A micro-batch without a counted token may be left out on a rank that has nothing to do in it."""
    empty = PaddedLayout(torch.zeros(2, 3, dtype=torch.bool))
    window = Objective(estimator=GRPO()).freeze([(ESTIMATE, LAYOUT), (ESTIMATE, empty)])
    return window.summarize([window.loss(tokens(window, torch.zeros(2, 3)))])["window/tokens"]


def test_an_empty_micro_batch_may_be_left_out() -> None:
    assert run_ranks(leave_out_what_is_empty, 2) == [12.0, 12.0]


def fail_on_some() -> None:
    with raised_together(Communicator.world()):
        if dist.get_rank():
            raise OSError(f"disk {dist.get_rank()} is full")


def test_every_rank_that_failed_is_named() -> None:
    first, *others = run_ranks(fail_on_some, 3, expect_errors=True)
    assert (
        "rank 1 stopped with OSError: disk 1 is full.; rank 2 stopped with OSError: disk 2 is full."
        in str(first)
    )
    assert [str(one) for one in others] == ["disk 1 is full", "disk 2 is full"]


def test_in_a_single_process_a_loss_raises_at_once() -> None:
    window = Objective(estimator=GRPO()).freeze([(ESTIMATE, LAYOUT)])
    with pytest.raises(ShapeError):
        window.loss(TokenBatch(logprobs=torch.zeros(2, 3), layout=LAYOUT, advantages=torch.zeros(2, 1)))


def test_a_fault_keeps_what_ends_a_program_and_nothing_else() -> None:
    fault = Fault()
    with fault.guard():
        raise KeyboardInterrupt
    assert isinstance(fault.error, KeyboardInterrupt)
    with pytest.raises(GeneratorExit), Fault().guard():
        raise GeneratorExit
