"""How many messages of ours between ranks an optimizer step of TRL costs, by objective, beside TRL's own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

from torch import Tensor

from rlobjectives import GDPO, GRPO, P3O, Communicator, KLCov, Objective
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny

OBJECTIVES = {
    "grpo": Objective.named("grpo"),
    "gdpo": Objective.named("gdpo"),
    "p3o": Objective(estimator=GDPO(), policy_loss=P3O()),
    "m2po": Objective.named("m2po"),
    "dapo_entropy": Objective.named("dapo_entropy"),
    "kl_cov": Objective(estimator=GRPO(), policy_loss=KLCov()),
}


@pytest.mark.parametrize(
    ("name", "messages"),
    [("grpo", 2), ("gdpo", 2), ("p3o", 2), ("m2po", 4), ("dapo_entropy", 4), ("kl_cov", 5)],
)
def test_messages_of_a_step(name: str, messages: int, monkeypatch: Any) -> None:
    """The opening of the window and its report, whatever the number of micro-batches; before the first, the self-test."""
    config = ObjectiveConfig(
        **tiny.options(max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    )
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, objective=OBJECTIVES[name])
    gather, at = Communicator.gather, []

    def counted(self: Communicator, row: Tensor) -> Tensor:
        at.append(trained.state.global_step)
        return gather(self, row)

    monkeypatch.setattr(Communicator, "gather", counted)
    trained.train()
    assert [at.count(step) for step in range(3)] == [messages + 1, messages, messages]
