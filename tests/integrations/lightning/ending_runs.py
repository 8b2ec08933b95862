"""On two ranks: options that differ, and what goes wrong in a forward on one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlobjectives import GRPO, Objective, PolicyLoss, TokenLoss
from rlobjectives.integrations.lightning import Experience
from tests.integrations.lightning.runs import fit, uneven
from tests.integrations.lightning.toy import ToyPolicy


class Capped(PolicyLoss):
    """A part that is no dataclass."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def value_and_slope(self, tokens: Any, context: Any) -> TokenLoss:
        return TokenLoss(tokens.logprobs, torch.full_like(tokens.logprobs, self.cap))


class Rated(ToyPolicy):
    """A module with options of its own, one of which it keeps under another name."""

    def __init__(
        self, *, learning_rate: float = 0.1, decay: float = 0.0, folder: str = "", **options: Any
    ) -> None:
        super().__init__(uneven, **options)
        self.rate, self._decay = learning_rate, decay

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, weight_decay=self._decay)


class Free(Rated):
    """One of whose options may differ, and whose optimizer reads something that is no option."""

    may_differ = frozenset({"folder"})

    def configure_optimizers(self) -> Any:
        rate = 0.1 + 0.1 * self.global_rank if self.rate == 7.0 else self.rate
        return torch.optim.SGD(self.parameters(), lr=rate)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learning_rate": ({"learning_rate": 0.1}, {"learning_rate": 0.2}),
    "decay": ({"decay": 0.0}, {"decay": 0.5}),
    "gradient_clip_val": ({}, {"gradient_clip_val": 0.5}),
    "epochs_per_rollout": ({"epochs_per_rollout": 1}, {"epochs_per_rollout": 2}),
    "windows_per_rollout": ({"windows_per_rollout": 2}, {}),
    "micro_batch_size": ({"micro_batch_size": 2}, {"micro_batch_size": 3}),
    "seed": ({"seed": 1}, {"seed": 2}),
    "folder": ({"folder": "a"}, {"folder": "b"}),
    "objective.policy_loss": (
        {"objective": Objective(estimator=GRPO(), policy_loss=Capped(0.9))},
        {"objective": Objective(estimator=GRPO(), policy_loss=Capped(0.1))},
    ),
}


class Broken(ToyPolicy):
    """Goes wrong in the forward of rank 1's last micro-batch."""

    def __init__(self, how: str) -> None:
        super().__init__(uneven)
        self.how, self.forwards = how, 0

    def score(self, micro_batch: Experience) -> tuple[Tensor, None]:
        self.forwards += 1
        logprobs, _ = super().score(micro_batch)
        if self.global_rank == 1 and self.forwards == 5:
            if self.how == "shape":
                return logprobs[:, :-1], None
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")
        return logprobs, None


def told(work: Callable[[], Any]) -> str:
    """What a run ends with."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # the tests decide what an error means
        return f"{type(error).__name__}: {error}"
    return "nothing"


def cases(strategy: str, folder: str) -> None:
    """Write what each case ends with into a file of this rank. Rank 1 leaves as a program would that failed."""
    rank = int(os.environ["RANK"])
    found: dict[str, str] = {}
    if strategy == "ddp":
        for name, pair in OPTIONS.items():
            found[name] = told(lambda pair=pair: fit(Rated(**pair[rank]), strategy, rollouts=1))
        found["max_steps"] = told(lambda: fit(Rated(), strategy, rollouts=1, max_steps=3 + rank))
        found["may differ"] = told(lambda: fit(Free(folder=str(rank)), strategy, rollouts=1))
        found["optimizer"] = told(lambda: fit(Free(learning_rate=7.0), strategy, rollouts=1))
    found["shape"] = told(lambda: fit(Broken("shape"), strategy, rollouts=1))
    found["forward"] = told(lambda: fit(Broken("exception"), strategy, rollouts=1))
    Path(folder, f"{strategy}-{rank}.json").write_text(json.dumps(found))
    if rank == 1:
        os._exit(3)
