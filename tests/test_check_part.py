"""`check_part` catches what it says it catches, with a small example that can be pasted, and passes what is right."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from rlobjectives import (
    CapabilityError,
    ClippedSurrogate,
    Objective,
    TokenMean,
    group_metrics,
    length_metrics,
    reward_metrics,
)
from rlobjectives.testing import Example, LawError, MicroBatch, Shard, check_part
from tests import bad_parts as bad

CATALOGUE: list[tuple[Any, str, str]] = [
    (bad.WrongSign(), "slope", "wrong sign"),
    (bad.HalfDetached(), "slope", "set straight_through = True"),
    (bad.NoGraph(), "runs", "does not depend on tokens.logprobs"),
    (bad.BatchCentred(), "partition", "the gradient of logprobs is off by"),
    (bad.BatchCentred(), "blocks", ""),
    (bad.OwnSequenceSums(), "context", ""),
    (bad.MaskByProduct(), "masking", ""),
    (bad.PaddedMetric(), "layout", "own/mean"),
    (bad.PaddedMetric(), "masking", "own/mean"),
    (bad.Whitened(), "dropped", ""),
    (bad.GroupMean(), "dropped", ""),
    (bad.ByPosition(), "order", "where it stands"),
    (bad.Rounded(), "equal rewards", "all rewards of a prompt are"),
    (bad.Rounded(), "offset", "on top of every reward"),
    (bad.RunningMean(), "state", "RankError"),
    (bad.HiddenRunningMean(), "state", "instead of"),
    (bad.RunningMean(), "no wait", "HostSync"),
    (bad.Waits(), "no wait", "HostSync"),
    (bad.Hidden(), "agreement", "coef of Hidden changes the numbers and is not compared"),
    (bad.Elsewhere(), "agreement", "coef of Elsewhere"),
    (bad.Locked(), "copies", "cannot be pickled"),
    (bad.Unchecked(), "options", "coef='no value of this option'"),
    (bad.ReadsMore(), "reads", "teacher_logprobs"),
    (bad.EstimatesFromMore(), "reads", "EstimatesFromMore reads values"),
    (bad.PaddedTokenMetric(), "layout", "own/mean"),
    (bad.PaddedTokenMetric(), "masking", "own/mean"),
    (bad.CountsEmpty(), "partition", ""),
    (bad.NoMean(), "weights", "add up to"),
    (bad.padded_metric, "partition", "0 sequences give []"),
    (bad.padded_metric, "dropped", "own/reward_"),
]


@pytest.mark.parametrize(
    ("part", "law", "words"), CATALOGUE, ids=lambda value: getattr(value, "__name__", None)
)
def test_what_breaks_a_law_is_caught(part: Any, law: str, words: str) -> None:
    report = check_part(part, laws=["runs", law] if law == "runs" else [law])
    (found,) = report.failed
    assert found.law == law
    assert words in str(found)
    with pytest.raises(LawError, match=law):
        report.raise_if_failed()


@pytest.mark.parametrize(
    "part", [bad.Plain(), bad.SaidBatchCentred(), bad.GoodWhitened(), bad.GoodTokenMetric(), bad.good_metric]
)
def test_what_is_right_passes_every_law(part: Any) -> None:
    check_part(part).raise_if_failed()


@pytest.mark.parametrize("metric", [reward_metrics, group_metrics, length_metrics])
def test_metrics_of_the_package_pass(metric: Any) -> None:
    report = check_part(metric)
    report.raise_if_failed()
    assert [one.law for one in report.findings] == ["partition", "layout", "masking", "dropped", "no wait"]


def test_the_printed_example_fails_again_when_pasted() -> None:
    (found,) = check_part(bad.WrongSign(), laws=["slope"]).failed
    names = {
        "part": bad.WrongSign(),
        "check_part": check_part,
        "Example": Example,
        "Shard": Shard,
        "MicroBatch": MicroBatch,
    }
    code = "\n".join(
        line.strip() for line in str(found).splitlines() if "example =" in line or "check_part" in line
    )
    with pytest.raises(LawError, match="wrong sign"):
        exec(code, names)


def test_the_example_is_small() -> None:
    (slope,) = check_part(bad.WrongSign(), laws=["slope"]).failed
    assert slope.example is not None
    assert slope.example.draw().mask.sum() <= 2
    (cut,) = check_part(bad.BatchCentred(), laws=["partition"]).failed
    assert cut.example is not None
    assert sum(len(batch.rows) for rank in cut.example.cut for batch in rank) <= 3
    assert sum(len(rank) for rank in cut.example.cut) == 2


def test_a_part_that_does_not_run_is_told_once() -> None:
    report = check_part(bad.NoGraph())
    assert [one.law for one in report.failed] == ["runs"]
    assert {one.exempt for one in report.findings if one.law != "runs"} == {"no window runs"}


def test_the_report_is_a_table() -> None:
    text = str(check_part(bad.WrongSign(), laws=["slope", "order", "runs"]))
    assert text.startswith("WrongSign(): 1 of 2 laws hold\n  runs   holds  a window runs")
    assert "\n  order  –      no estimator\n  slope  FAILS  the slope is" in text


def test_checking_leaves_the_part_and_the_streams_alone() -> None:
    part, out = bad.RunningMean(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        check_part(part, laws=["state", "non-finite"])
    assert (part.total, part.count) == (0.0, 0.0)
    assert out.getvalue() == ""


def test_objectives_and_functions_are_checked_as_well() -> None:
    assert not check_part(Objective.named("gspo"), laws=["partition", "slope", "weights"]).failed
    assert not check_part(lambda rollouts: rollouts.rewards.sum(1), laws=["partition", "order"]).failed


@pytest.mark.parametrize("nothing", [ClippedSurrogate, 3, "grpo"])
def test_what_is_no_part_is_refused(nothing: Any) -> None:
    with pytest.raises(CapabilityError, match="expected an instance of a part"):
        check_part(nothing)


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(CapabilityError, match="slope"):
        check_part(TokenMean(), laws=["sloop"])
