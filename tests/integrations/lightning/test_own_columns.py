"""Columns of a user's own under Lightning: what a rollout brings in ``extra`` reaches the parts through any cut."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("lightning")

import torch

from rlobjectives import GRPO, MissingColumnError, Objective
from rlobjectives.integrations.lightning import Experience
from tests.integrations.lightning.runs import fit, uneven
from tests.integrations.lightning.toy import ToyPolicy, initial_weights
from tests.own_columns import OBJECTIVE, Gated
from tests.ranks import RankFailure, run_ranks


def rated(rank: int | None, rollout: int) -> Experience:
    """Uneven rollouts with a mark per sequence and a confidence per token, made of the ids so that any cut has the same."""
    found = uneven(rank, rollout)
    extra = {"confidence": found.input_ids / 7.0, "score": found.input_ids.double().sum(1) / 20.0}
    return found.replace(extra=extra)


def unrated(rank: int | None, rollout: int) -> Experience:
    return uneven(rank, rollout)


def trained(source: object, strategy: str = "single", **options: int) -> torch.Tensor:
    weights: torch.Tensor = fit(
        ToyPolicy(source, objective=OBJECTIVE, **options), strategy, rollouts=1
    ).trace[-1]["weights"]
    return weights


def test_they_reach_the_parts_through_any_cut() -> None:
    whole = trained(rated, micro_batch_size=16)
    assert (whole - initial_weights()).abs().max() > 1e-3
    for size in (1, 2, 5):
        torch.testing.assert_close(trained(rated, micro_batch_size=size), whole, rtol=2e-5, atol=2e-5)


def on_two_ranks() -> torch.Tensor:
    return trained(rated, "ddp")


def test_they_reach_the_parts_on_uneven_ranks() -> None:
    first, second = run_ranks(on_two_ranks, 2, timeout=120.0)
    assert torch.equal(first, second)
    assert (first - initial_weights()).abs().max() > 1e-3


def test_what_is_missing_is_said() -> None:
    with pytest.raises(
        MissingColumnError, match=r"FromMarks reads score, .* Give Rollouts\(extra=\{'score': "
    ):
        trained(unrated)


def rated_on_rank_0(rank: int | None, rollout: int) -> Experience:
    return unrated(rank, rollout) if rank else rated(rank, rollout)


def missing_on_rank_1() -> None:
    trained(rated_on_rank_0, "ddp")


def test_what_is_missing_on_one_rank_ends_all() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(missing_on_rank_1, 2, timeout=120.0)
    for error in caught.value.errors.values():
        assert "FromMarks reads score" in str(error)
    assert len(caught.value.errors) == 2


def test_they_move_with_the_experience() -> None:
    found = rated(None, 0)
    rollouts = dataclasses.replace(found.need_rollouts(), extra={"score": found.extra["score"]})
    moved = found.replace(rollouts=None).to("meta")
    assert moved.extra["score"].device.type == "meta"
    again = found.replace(rollouts=rollouts).to("cpu")
    assert torch.equal(again.need_rollouts().extra["score"], found.extra["score"])


GATED = Objective(estimator=GRPO(), policy_loss="Reinforce", terms=(Gated(),))


def gated_on_rank_0(rank: int | None, rollout: int) -> Experience:
    found = uneven(rank, rollout)
    return found if rank else found.replace(extra={"gate": found.input_ids / 7.0})


def optional_on_one_rank() -> None:
    fit(ToyPolicy(gated_on_rank_0, objective=GATED), "ddp", rollouts=1)


def test_what_may_be_left_out_is_left_out_on_all_ranks() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(optional_on_one_rank, 2, timeout=120.0)
    for error in caught.value.errors.values():
        assert "columns of the rollout" in str(error) and "extra.gate" in str(error)
