"""Two ranks: different options are refused before training; an error on one ends both, with its words."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from rlobjectives import WindowError
from rlobjectives.causal_lm import PromptDataModule
from rlobjectives.integrations.lightning.agreement import given_options
from tests.integrations.lightning.ending_runs import OPTIONS, Broken, Rated, cases
from tests.integrations.lightning.runs import fit
from tests.integrations.lightning.toy import GROUPS, ToyPolicy, experience
from tests.ranks import RankFailure, run_ranks

STRATEGIES = ("ddp", "fsdp2", "zero3")
pytestmark = pytest.mark.timeout(390)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank ended with, by strategy and case."""
    folder = tmp_path_factory.mktemp("ending")

    @functools.cache
    def of(strategy):
        with pytest.raises(RankFailure, match="rank 1 died with exit code 3"):
            run_ranks(cases, 2, strategy, str(folder), timeout=300, fresh=True)
        return [json.loads((folder / f"{strategy}-{rank}.json").read_text()) for rank in (0, 1)]

    return of


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_differ_are_named_on_both_ranks(found, option):
    for rank in found("ddp"):
        assert rank[option].startswith("RankError: ranks were given different options (rank 0 / rank 1): ")
        assert f"{option} is " in rank[option]
        assert rank[option].count(" on rank 1") == 1


def test_values_stand_beside_the_ranks_that_have_them(found):
    first, second = found("ddp")
    assert first["learning_rate"] == second["learning_rate"]
    assert "learning_rate is 0.1 on rank 0, and 0.2 on rank 1" in first["learning_rate"]
    assert "Capped(cap=0.9) on rank 0, and Capped(cap=0.1) on rank 1" in first["objective.policy_loss"]
    assert "Trainer.max_steps is 3 on rank 0, and 4 on rank 1" in first["max_steps"]


def test_what_may_differ_may_and_what_the_optimizer_got_may_not(found):
    for rank in found("ddp"):
        assert rank["may differ"] == "nothing"
        assert "optimizer group 0: lr is 0.1 on rank 0, and 0.2 on rank 1" in rank["optimizer"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrong_shape_on_one_rank_is_raised_on_both(found, strategy):
    first, second = (rank["shape"] for rank in found(strategy))
    assert second.startswith("ShapeError: logprobs has shape")
    assert first.startswith("RankError: rank 1 stopped with ShapeError: logprobs has shape")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_that_fails_on_one_rank_ends_both(found, strategy):
    first, second = (rank["forward"] for rank in found(strategy))
    assert second == "OutOfMemoryError: tried to allocate 7 GiB"
    assert first.startswith("RankError: rank 1 stopped with OutOfMemoryError: tried to allocate 7 GiB")


def test_a_single_process_raises_its_own_error():
    policy = Broken("exception")
    vars(policy)["score"] = lambda micro_batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(policy, "single", rollouts=1)


def masked(rank, rollout):
    return experience(GROUPS[0], seed=rollout, masked=True)


def masked_but_once(rank, rollout):
    return experience(GROUPS[0], seed=rollout, masked=rollout % 3 != 2)


def test_a_run_in_which_nothing_counts_stops_and_says_so():
    with pytest.raises(WindowError, match="the last 3 rollouts had no counted token on any rank.*max_steps"):
        fit(ToyPolicy(masked, max_empty_rollouts=3, windows_per_rollout=2), "single", rollouts=9, max_steps=5)
    patient = fit(ToyPolicy(masked_but_once, max_empty_rollouts=3), "single", rollouts=9)
    assert patient.trainer.global_step == 3
    with pytest.raises(ValueError, match="max_empty_rollouts"):
        ToyPolicy(masked, max_empty_rollouts=0)


def test_options_are_those_the_constructors_got():
    given = Rated(learning_rate=0.3, micro_batch_size=4)._options_given
    assert given["learning_rate"] == "0.3"
    assert given["micro_batch_size"] == "4"
    assert given["windows_per_rollout"] == "1"  # nobody gave it
    assert given["source"] == "tests.integrations.lightning.runs.uneven"
    assert not {"self", "options", "kwargs"} & {*given}
    data = PromptDataModule([{"prompt": "1+1="}], prompts_per_step=1)
    assert data._options_given["prompts_per_step"] == "1"
    assert given_options(torch.nn.Linear(1, 1), None) == {}
