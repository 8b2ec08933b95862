"""How many messages between ranks a training step costs, by objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import GDPO, GRPO, P3O, Communicator, KLCov, Objective
from rlobjectives.integrations.lightning import Experience
from tests.integrations.lightning.runs import fit
from tests.integrations.lightning.toy import GROUPS, ToyPolicy, experience

OBJECTIVES = {
    "grpo": Objective.named("grpo"),
    "gdpo": Objective.named("gdpo"),
    "p3o": Objective(estimator=GDPO(), policy_loss=P3O()),
    "m2po": Objective.named("m2po"),
    "dapo_entropy": Objective.named("dapo_entropy"),
    "kl_cov": Objective(estimator=GRPO(), policy_loss=KLCov()),
}


def sampled(rank: Any, rollout: int) -> Experience:
    made = experience(GROUPS[0], seed=rollout)
    return made.replace(behavior_logprobs=made.ref_logprobs)


class Counted(ToyPolicy):
    """Notes how many exchanges each rollout took."""

    counts: list[int]

    def score(self, micro_batch: Experience) -> tuple[Tensor, Tensor]:
        logprobs, _ = super().score(micro_batch)
        return logprobs, logprobs.detach().abs()

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(0)


# One for the rollout (rewards, errors, micro-batches), and for each window its opening and its report.
@pytest.mark.parametrize(
    ("name", "one_update", "two_updates"),
    [
        ("grpo", 3, 5),
        ("gdpo", 3, 5),
        ("p3o", 3, 6),  # a window that has to run its pre-pass agrees on the number of forwards before
        ("m2po", 5, 10),
        ("dapo_entropy", 5, 10),
        ("kl_cov", 6, 12),
    ],
)
def test_messages_of_a_rollout(name: str, one_update: int, two_updates: int, monkeypatch: Any) -> None:
    gather, found = Communicator.gather, {}
    for epochs in (1, 2):
        policy = Counted(sampled, objective=OBJECTIVES[name], epochs_per_rollout=epochs)
        policy.counts = []

        def counted(self: Communicator, row: Tensor, policy: Counted = policy) -> Tensor:
            if policy.counts:
                policy.counts[-1] += 1
            return gather(self, row)

        monkeypatch.setattr(Communicator, "gather", counted)
        fit(policy, "single", rollouts=3)
        found[epochs] = policy.counts[1:]  # the first step also compares the optimizer's options
        assert torch.isfinite(policy.trace[-1]["weights"]).all()
    assert found == {1: [one_update] * 2, 2: [two_updates] * 2}
