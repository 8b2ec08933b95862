"""Laws about what counts: masked values change nothing, and what is wrong where it counts is reported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from rlobjectives.distributed.communicator import Communicator
from rlobjectives.errors import NonFiniteError, RankError
from rlobjectives.testing.cases import GARBAGE, Case, MicroBatch, Shard
from rlobjectives.testing.compare import assert_equal, require
from rlobjectives.testing.examples import Example
from rlobjectives.testing.simulate import Outcome, run_ranks_as_threads, simulate, whole
from rlobjectives.testing.subject import Subject, open_window

__all__ = ["dummy", "empty", "failure", "masked_columns", "masking", "no_repair"]

_BAD = (float("nan"), float("-inf"))


def masking(subject: Subject, example: Example) -> None:
    """Whatever stands under a false mask, to the last bit."""
    case, objective = subject.draw(example), subject.fresh()
    estimate = objective.estimator.estimate(case.rollouts())
    clean = whole(objective, case, replace(example.shard, garbage=None), estimate)
    assert_equal(whole(objective, case, example.shard, estimate), clean)


def masked_columns(subject: Subject, example: Example) -> None:
    """Whatever stands in reward cells without a score, and at masked tokens, before the estimate."""
    case, estimator = subject.draw(example), subject.fresh().estimator
    clean = estimator.estimate(case.rollouts())
    for garbage in GARBAGE:
        dirty = replace(case, rewards=torch.where(case.scored, case.rewards, garbage))
        found = estimator.estimate(dirty.rollouts(shard=Shard(garbage=garbage)))
        require(torch.equal(found, clean), f"{garbage} where nothing counts changes the estimate")


def _last_alone(case: Case) -> tuple[int, list[list[MicroBatch]]]:
    """A sequence that counts, and a plan on two ranks in which it is alone in the last micro-batch."""
    row = int(case.mask.any(1).nonzero()[0])
    others = tuple(other for other in range(case.count) if other != row)
    return row, [[MicroBatch(others)], [MicroBatch(()), MicroBatch((row,))]]


def _broken(subject: Subject, example: Example) -> Iterator[tuple[str, list[Outcome | Exception]]]:
    case = subject.draw(example).with_tokens()
    row, plan = _last_alone(case)
    objective = subject.fresh()
    estimate = objective.estimator.estimate(case.rollouts())
    place = int(case.mask[row].nonzero()[0])
    for turn, column in enumerate(objective.columns()):
        values = case.columns[column].clone()
        values[row, place] = _BAD[(example.seed + turn) % 2]
        yield column, simulate(objective, case.replaced(**{column: values}), plan, estimate=estimate)
    for bad in (*_BAD, 1e300):  # infinite in the precision it is used in
        spoiled = estimate.clone()
        spoiled[row] = bad
        yield "estimate", simulate(objective, case, plan, estimate=spoiled)


def no_repair(subject: Subject, example: Example) -> None:
    """A number that is not finite, at one token that counts, is an error on all ranks that says where."""
    for column, outcomes in _broken(subject, example):
        told = f"rank 1, micro-batch 1: {column} has "
        for outcome in outcomes:
            right = isinstance(outcome, NonFiniteError) and told in str(outcome)
            require(right, f"{column} is not finite at a place that counts, and a rank gives {outcome!r}")
            require("Raised on all 2 ranks" in str(outcome), f"a rank stops alone: {outcome}")


def failure(subject: Subject, example: Example) -> None:
    """An exception on one rank ends all ranks at the same point."""
    case, objective = subject.draw(example), subject.fresh()

    def one(communicator: Communicator) -> None:
        builder = objective.window(communicator)
        with builder.guard():
            if communicator.rank == 1:
                raise NonFiniteError("a rollout that failed")
            rollouts = case.rollouts()
            layout = rollouts.tokens("a law")
            builder.add(estimate=objective.estimator.estimate(rollouts), layout=layout)
            if objective.capabilities.needs_prepass:
                builder.add_prepass(case.tokens(torch.arange(case.count)))
        builder.freeze()

    kinds = [type(error) for error in run_ranks_as_threads(one, 3)]
    require(kinds == [RankError, NonFiniteError, RankError], f"the ranks end with {kinds}")


def empty(subject: Subject, example: Example) -> None:
    """A window without tokens is an exact zero, attached to the graph, on one rank and on several."""
    drawn = subject.draw(example)
    case = replace(drawn, mask=torch.zeros_like(drawn.mask)).without(subject.refused)
    leaf = case.columns["logprobs"].clone().requires_grad_()
    shard = replace(example.shard, garbage=None)
    window, _, tokens = open_window(subject.fresh(), case.replaced(logprobs=leaf), shard)
    output = window.loss(tokens)
    require(window.empty, "the window does not know that it is empty")
    require(output.loss.requires_grad, "the loss of an empty window is not attached to the graph")
    output.loss.backward()
    zero = float(output.loss.detach()) == 0.0 and leaf.grad is not None and not bool(leaf.grad.any())
    require(zero, f"the loss of an empty window is {float(output.loss.detach())}, its gradient {leaf.grad}")
    for name, value in window.summarize([output]).items():
        require(math.isfinite(value), f"the metric {name} of an empty window is {value}")
    rows = [MicroBatch((row,)) for row in range(case.count)]
    for outcome in simulate(subject.objective, case, [rows[:2], [], rows[2:]]):
        if isinstance(outcome, Exception):
            raise outcome
        require(float(outcome.loss) == 0.0, f"a rank of an empty window has the loss {float(outcome.loss)}")


def dummy(subject: Subject, example: Example) -> None:
    """A micro-batch in which nothing counts is an exact zero, whatever it holds."""
    case = subject.draw(example)
    window, _, _ = open_window(subject.fresh(), case)
    tokens = case.dummy()
    output = window.loss(tokens)
    output.loss.backward()
    gradient = tokens.logprobs.grad
    zero = float(output.loss.detach()) == 0.0 and gradient is not None and not bool(gradient.any())
    require(zero, f"a dummy has the loss {float(output.loss.detach())} and the gradient {gradient}")
