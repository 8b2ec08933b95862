"""Columns of a user's own under TRL: per sequence from the data, per token from the ``rollout_func``."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig

from rlobjectives import CapabilityError, GivenAdvantages, Objective
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer
from tests.integrations.trl import tiny
from tests.own_columns import OBJECTIVE

CUT = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}


def confidence(ids: list[int]) -> list[float]:
    return [0.1 + 0.05 * (token % 7) for token in ids]


def sampler(**columns: Any) -> Any:
    """The fixed rollout with more columns."""
    plain = tiny.fixed_rollout({})

    def rollout(batch: list[str], trainer: Any) -> dict[str, Any]:
        found = plain(batch, trainer)
        return found | {
            name: [column(ids) for ids in found["completion_ids"]] for name, column in columns.items()
        }

    return rollout


def data(**columns: Any) -> Dataset:
    found = tiny.prompts()
    for name, column in columns.items():
        found = found.add_column(name, [column(row) for row in range(len(found))])
    return found


def run(options: dict[str, Any], rollout: Any, rows: Dataset) -> Any:
    config = GRPOConfig(**tiny.options(max_steps=2, **options))
    trained = tiny.trainer(
        ObjectiveGRPOTrainer, config, objective=OBJECTIVE, rollout_func=rollout, train_dataset=rows
    )
    trained.train()
    return tiny.parameters(trained)


def test_they_reach_the_parts_through_any_cut() -> None:
    scores = data(score=lambda row: 0.25 * (row % 3) - 0.2)
    whole = run({}, sampler(confidence=confidence), scores)
    assert (run(CUT, sampler(confidence=confidence), scores) - whole).abs().max() <= 2e-6
    for other in (
        run({}, sampler(confidence=lambda ids: [1.0] * len(ids)), scores),
        run({}, sampler(confidence=confidence), data(score=lambda row: 0.0)),
    ):
        assert (other - whole).abs().max() > 1e-3


def test_a_sequence_column_may_come_from_the_sampler_too() -> None:
    rollout = sampler(confidence=confidence, score=lambda ids: 0.1 * len(ids))
    other = sampler(confidence=confidence, score=lambda ids: 0.0)
    assert (run({}, rollout, tiny.prompts()) - run({}, other, tiny.prompts())).abs().max() > 1e-3


def test_ready_advantages_are_refused_where_nobody_brings_them() -> None:
    config = GRPOConfig(**tiny.options(max_steps=1))
    with pytest.raises(
        CapabilityError, match=r"it needs ready advantages \(advantages\); the trainer has none"
    ):
        tiny.trainer(ObjectiveGRPOTrainer, config, objective=Objective(estimator=GivenAdvantages()))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {},
            r"reads confidence \(how sure .*completion 0 came with none. Let rollout_func return \"confidence\"",
        ),
        (
            {"confidence": lambda ids: confidence(ids)[1:]},
            r"completion 0 came with \d numbers.*one number per token of its",
        ),
        (
            {"confidence": confidence},
            r"reads score \(.*came with none. .* or give the data that column: one number per row",
        ),
        ({"confidence": confidence, "score": lambda ids: "high"}, "completion 0 came with 'high'"),
    ],
)
def test_what_is_missing_is_said(columns: Any, message: str) -> None:
    with pytest.raises(CapabilityError, match=message):
        run({}, sampler(**columns), tiny.prompts())
