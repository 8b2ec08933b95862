"""On two ranks: options that differ, and what goes wrong on one of them, in TRL."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learning_rate": ({"learning_rate": 0.1}, {"learning_rate": 0.2}),
    "max_grad_norm": ({"max_grad_norm": 0.0}, {"max_grad_norm": 1.0}),
    "num_iterations": ({"num_iterations": 1}, {"num_iterations": 2}),
    "max_steps": ({"max_steps": 1}, {"max_steps": 2}),
    "dynamic_sampling": ({}, {"dynamic_sampling": "drop"}),
    "objective: policy_loss": ({}, {"objective_args": {"policy_loss": {"clip_high": 0.3}}}),
}


def broken_reward(completions: list[str], **_: Any) -> list[float]:
    if os.environ["RANK"] == "1":
        raise LookupError("no verifier here")
    return [1.0] * len(completions)


def short_reward(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - (os.environ["RANK"] == "1"))


def made(options: dict[str, Any], **extra: Any) -> Any:
    config = ObjectiveConfig(
        **tiny.options(**{"objective": "grpo", "per_device_train_batch_size": 4, "max_steps": 1, **options})
    )
    return tiny.trainer(ObjectiveGRPOTrainer, config, **extra)


def told(work: Callable[[], Any]) -> str:
    """What a run ends with."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # the tests decide what an error means
        return f"{type(error).__name__}: {error}"
    return "nothing"


def forward_fails() -> None:
    trained = made({"gradient_accumulation_steps": 2})
    compute, calls = trained._get_per_token_logps_and_entropies, []

    def broken(*inputs: Any, **options: Any) -> Any:
        calls.append(0)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")
        return compute(*inputs, **options)

    trained._get_per_token_logps_and_entropies = broken
    trained.train()


def cases(folder: str, last: str) -> None:
    """Write what each case ends with into a file of this rank. Rank 1 leaves as a program would that failed."""
    rank = int(os.environ["RANK"])
    found: dict[str, str] = {}
    if last == "reward":
        for name, pair in OPTIONS.items():
            found[name] = told(lambda pair=pair: made(pair[rank]))
        found["same"] = told(lambda: made({}).train())
    ends: dict[str, Callable[[], Any]] = {
        "reward": lambda: made({}, reward_funcs=[broken_reward]).train(),
        "length": lambda: made({}, reward_funcs=[short_reward]).train(),
        "forward": forward_fails,
    }
    found[last] = told(ends[last])
    Path(folder, f"{last}-{rank}.json").write_text(json.dumps(found))
    if rank == 1:
        os._exit(3)
