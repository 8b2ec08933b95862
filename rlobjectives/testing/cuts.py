"""Laws about how a window is cut and laid out: the numbers are those of one process with one batch."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from rlobjectives.objective import Objective
from rlobjectives.testing.cases import Case, Shard
from rlobjectives.testing.compare import assert_same, require
from rlobjectives.testing.examples import Example
from rlobjectives.testing.simulate import LonelyRankError, Outcome, copies, simulate, together, whole
from rlobjectives.testing.subject import Subject

__all__ = ["blocks", "dropped", "layout", "order", "partition", "runs", "state"]


def tolerance(example: Example) -> float:
    """What rounding may make of a sum in another order."""
    return 1e-12 if example.dtype == torch.float64 else 1e-6


def runs(subject: Subject, example: Example) -> None:
    """One window, from rollouts to the backward pass."""
    outcome = whole(subject.fresh(), subject.draw(example))
    require(bool(outcome.loss.isfinite()), f"the loss is {float(outcome.loss)}")


def _joined(outcomes: list[Outcome | Exception]) -> Outcome:
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise next((error for error in errors if not isinstance(error, LonelyRankError)), errors[0])
    done = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    require(all(one.metrics == done[0].metrics for one in done), "the ranks report different metrics")
    return together(done)


def partition(subject: Subject, example: Example) -> None:
    """A window cut over micro-batches, ranks and the ranks that share a sequence."""
    case = subject.draw(example)
    expected = whole(subject.fresh(), case)
    found = _joined(simulate(subject.objective, case, example.cut, example.context))
    assert_same(found, expected, tolerance(example))


def state(subject: Subject, example: Example) -> None:
    """Two windows one after the other, on ranks that keep what they remember to themselves."""
    first, second = (subject.draw(replace(example, seed=example.seed + k)) for k in range(2))
    alone = subject.fresh()
    whole(alone, first)
    expected = whole(alone, second)
    ranks = copies(subject.objective, len(example.cut))
    _joined(simulate(ranks, first, example.cut))
    assert_same(_joined(simulate(ranks, second, example.cut)), expected, tolerance(example))


def layout(subject: Subject, example: Example) -> None:
    """The same sequences padded, packed, and with more padding."""
    case = subject.draw(example)
    expected = whole(subject.fresh(), case)
    for shard in (Shard(packed=True), Shard(extra=max(example.shard.extra, 1))):
        assert_same(whole(subject.fresh(), case, shard), expected, 1e-12)


def blocks(subject: Subject, example: Example) -> None:
    """A micro-batch worked on in blocks of one or two sequences, as large ones are."""
    case, shard = subject.draw(example), replace(example.shard, garbage=None)
    expected = whole(subject.fresh(), case, shard)
    with (
        mock.patch("rlobjectives.layouts.padded.piece_limit", return_value=7),
        mock.patch("rlobjectives.layouts.packed.piece_limit", return_value=7),
        mock.patch("rlobjectives.masking._WORTHWHILE", 0),
    ):
        assert_same(whole(subject.fresh(), case, shard), expected, 1e-12)
        assert_same(whole(subject.fresh(), case, example.shard), expected, 1e-12)


def dropped(subject: Subject, example: Example) -> None:
    """Sequences that were dropped, before or after the estimate, beside a window that never had them."""
    case = subject.draw(example)
    kept = case.counted.nonzero().flatten()
    if not len(kept):
        return
    without = case.permuted(kept)
    estimator = subject.fresh().estimator
    early = estimator.estimate(case.rollouts())
    _same_without(subject.fresh(), (case, early), (without, estimator.estimate(without.rollouts())))
    late = estimator.estimate(replace(case, counted=torch.ones_like(case.counted)).rollouts())
    _same_without(subject.fresh(), (case, late), (without, late[kept]))


def _same_without(
    objective: Objective, full: tuple[Case, torch.Tensor], less: tuple[Case, torch.Tensor]
) -> None:
    expected = whole(objective, less[0], estimate=less[1])
    found = whole(objective, full[0], estimate=full[1])
    kept = full[0].counted
    gradients = {name: gradient[kept] for name, gradient in found.gradients.items()}
    assert_same(replace(found, gradients=gradients, advantages=found.advantages[kept]), expected, 1e-12)


def order(subject: Subject, example: Example) -> None:
    """The same sequences in another order, and under other names of their prompts."""
    case, estimator = subject.draw(example), subject.fresh().estimator
    estimate = estimator.estimate(case.rollouts())
    shuffled = torch.randperm(case.count, generator=torch.Generator().manual_seed(example.seed))
    moved = estimator.estimate(case.permuted(shuffled).rollouts())
    size = float(estimate.abs().max()) if estimate.numel() else 0.0
    same = torch.allclose(moved, estimate[shuffled], rtol=0.0, atol=1e-12 * size)
    require(same, "the estimate of a sequence depends on where it stands among the others")
    named = estimator.estimate(replace(case, group_ids=-3 * case.group_ids + 11).rollouts())
    require(torch.equal(named, estimate), "the estimate depends on the ids of the prompts")
