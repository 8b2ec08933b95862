"""The same training under every strategy: two ranks against one process in plain PyTorch."""

import functools
import itertools

import pytest
import torch

from rlobjectives import RankError
from tests.integrations.lightning.runs import (
    KILLED,
    all_cases,
    break_one_rank,
    idle,
    killed_while_saving,
    resumed_after_kill,
    uneven,
)
from tests.integrations.lightning.toy import joined, plain_update, relative_error
from tests.ranks import RankFailure, run_ranks

# Starting ranks costs more than training, so strategies share processes; yet each start stays well below the limit.
GROUPS = (("ddp", "fsdp2"), ("zero1", "zero2"), ("zero3",))
STRATEGIES = tuple(itertools.chain(*GROUPS))
STATEFUL = ("single", "ddp", "fsdp2", "zero3")
MICRO_BATCHES = 5  # of rank 0; rank 1 has one or none
pytestmark = pytest.mark.timeout(390)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each rank saw, by strategy; trained on first use."""

    @functools.cache
    def group(strategies):
        return run_ranks(all_cases, 2, strategies, str(folder), timeout=380, fresh=True)

    return lambda strategy: [rank[strategy] for rank in group(next(one for one in GROUPS if strategy in one))]


@pytest.fixture(scope="module")
def found(ranks, folder):
    """What the first rank saw."""

    @functools.cache
    def alone():
        return all_cases(("single",), str(folder))["single"]

    return lambda strategy: alone() if strategy == "single" else ranks(strategy)[0]


def both(source):
    return joined([source(0, 0), source(1, 0)])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("case", "source"), [("uneven", uneven), ("idle", idle)])
def test_the_first_update_is_that_of_one_process(found, strategy, case, source):
    expected, norm = plain_update(both(source))
    step = found(strategy)[case]["trace"][0]
    assert relative_error(step["weights"], expected) < 1e-6
    assert step["metrics"]["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_one_process_too(found):
    expected, _ = plain_update(uneven(None, 0))
    assert relative_error(found("single")["uneven"]["trace"][0]["weights"], expected) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_is_that_of_torch(found, strategy):
    expected, norm = plain_update(both(uneven), clip=0.05)
    assert norm > 0.05
    assert relative_error(found(strategy)["clipped"]["trace"][0]["weights"], expected) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_runs_as_many_backwards_and_ends_with_the_same_weights(ranks, strategy):
    for case in ("uneven", "idle"):
        first, second = (rank[case] for rank in ranks(strategy))
        assert first["backwards"] == second["backwards"] == MICRO_BATCHES
        assert torch.equal(first["trace"][0]["weights"], second["trace"][0]["weights"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_agree_on_all_ranks(ranks, strategy):
    first, second = (rank["uneven"]["trace"][0]["metrics"] for rank in ranks(strategy))
    timeless = {name for name in first if not name.startswith("time/")}
    assert {name: first[name] for name in timeless} == {name: second[name] for name in timeless}
    assert first["window/sequences"] == 11.0


@pytest.mark.parametrize("strategy", STATEFUL)
def test_an_empty_window_changes_nothing(found, strategy):
    before, empty, after = found(strategy)["empty"]["trace"]
    assert torch.equal(before["weights"], empty["weights"])
    assert torch.equal(before["optimizer"], empty["optimizer"])
    assert before["optimizer"].abs().sum() > 0
    assert (before["scheduler"], empty["scheduler"], after["scheduler"]) == ([1], [1], [2])
    assert (before["steps"], empty["steps"], after["steps"]) == (1, 1, 2)
    assert empty["metrics"]["optim/skipped_fraction"] == 1.0
    # What follows is what would have followed without it: momentum and second moments did not move either.
    without = found(strategy)["not empty"]["trace"][1]
    assert torch.equal(after["weights"], without["weights"])
    assert torch.equal(after["optimizer"], without["optimizer"])


@pytest.mark.parametrize("strategy", STATEFUL)
@pytest.mark.parametrize(
    ("resumed", "steps", "begun"), [("rest", [12, 16], [8, 12]), ("rest inside", [8, 12, 16], [8, 12])]
)
def test_a_resumed_run_takes_the_steps_of_an_uninterrupted_one(found, strategy, resumed, steps, begun):
    """From a rollout's end, and from between two of its steps: the same rollout goes on, and none is made twice."""
    runs = found(strategy)["resumed"]
    whole, rest = runs["whole"], runs[resumed]
    assert [step["steps"] for step in whole] == [4, 8, 12, 16]
    assert runs["begun"]["whole"] == [0, 4, 8, 12]
    assert [step["steps"] for step in rest] == steps
    assert runs["begun"][resumed] == begun
    assert not torch.equal(whole[1]["weights"], whole[2]["weights"])
    for expected, again in zip(whole[-len(steps) :], rest, strict=True):
        assert torch.equal(expected["weights"], again["weights"])
        assert torch.equal(expected["optimizer"], again["optimizer"])
        assert expected["scheduler"] == again["scheduler"]
        timeless = {name for name in expected["metrics"] if not name.startswith("time/")}
        assert {name: again["metrics"][name] for name in timeless} == {
            name: expected["metrics"][name] for name in timeless
        }


@pytest.mark.parametrize("strategy", STATEFUL)
def test_a_changed_bit_is_refused_and_the_checkpoint_before_is_named(found, strategy):
    error = found(strategy)["resumed"]["damaged"]
    assert error.startswith("CheckpointError: checkpoint ")
    assert "step=8.ckpt' is damaged: " in error
    assert "step=4.ckpt', is whole: take that" in error


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_a_changed_bit_stops_every_rank(ranks, strategy):
    assert "rank 0 stopped with CheckpointError" in ranks(strategy)[1]["resumed"]["damaged"]


@pytest.mark.parametrize("strategy", KILLED)
def test_sigkill_while_saving_leaves_the_checkpoint_before_and_the_same_end(ranks, strategy, tmp_path):
    whole = ranks(strategy)[0]["resumed"]["whole"]
    with pytest.raises(RankFailure):
        run_ranks(killed_while_saving, 2, strategy, str(tmp_path), timeout=180, fresh=True)
    assert sorted(one.name for one in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=8.ckpt"]
    rest = run_ranks(resumed_after_kill, 2, strategy, str(tmp_path), timeout=180, fresh=True)[0]
    assert [step["steps"] for step in rest] == [12, 16]
    for expected, again in zip(whole[2:], rest, strict=True):
        assert torch.equal(expected["weights"], again["weights"])
        assert torch.equal(expected["optimizer"], again["optimizer"])


def test_several_updates_on_a_rollout_agree_between_strategies(found):
    runs = {strategy: found(strategy)["several"]["trace"][-1] for strategy in ("ddp", "zero3", "fsdp2")}
    assert {step["steps"] for step in runs.values()} == {4}
    assert runs["ddp"]["metrics"]["policy/ratio_std"] > 0  # old log-probabilities are those of the start
    for strategy in ("zero3", "fsdp2"):
        torch.testing.assert_close(runs[strategy]["weights"], runs["ddp"]["weights"], rtol=1e-5, atol=1e-6)


def test_one_broken_rank_stops_all_of_them():
    first, second = run_ranks(break_one_rank, 2, timeout=300, fresh=True, expect_errors=True)
    assert isinstance(first, RankError)
    assert "rank 1" in str(first)
    assert isinstance(second, ZeroDivisionError)
