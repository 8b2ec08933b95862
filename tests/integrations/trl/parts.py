"""Parts and lists that several TRL tests share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor
from transformers import TrainerCallback

from rlobjectives import (
    ALGORITHMS,
    Capabilities,
    CapabilityError,
    Mean,
    PolicyLoss,
    Stat,
    TokenBatch,
    WindowContext,
)
from rlobjectives.integrations.trl.facts import trainer_facts
from rlobjectives.integrations.trl.objective_source import as_objective
from tests.integrations.trl import tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDrift(PolicyLoss):
    """A loss that must see the window's mean drift from the sampler before its first token."""

    capabilities: ClassVar[Capabilities] = Capabilities(needs_prepass=True)
    reads = ("behavior_logprobs",)
    window_statistics: ClassVar[dict[str, type[Stat]]] = {"drift": Mean}

    def statistics(self, tokens: TokenBatch, context: WindowContext) -> dict[str, Stat]:
        drift = tokens.logprobs - tokens.need("behavior_logprobs", "MeanDrift")
        return {"drift": Mean.of(drift.abs(), tokens.layout.mask)}

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        mean = context["drift"]
        assert isinstance(mean, Mean)
        scale = (1.0 + 10.0 * mean.value).float()
        return -scale * tokens.need("advantages", "MeanDrift").float() * tokens.logprobs


_STOCK = {
    "num_generations": tiny.GROUP,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "generation_kwargs": None,
    "use_vllm": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "max_completion_length": 8,
}


@cache
def fed() -> tuple[str, ...]:
    """Every registered objective that TRL can feed, by name alone, one update per rollout and two rewards."""
    # Not a GRPOConfig: making one would already decide how the ranks of a DeepSpeed run talk.
    config = SimpleNamespace(**_STOCK)
    found = []
    for name in sorted(ALGORITHMS):
        try:
            objective = as_objective(name, config)
            objective.check(trainer_facts(config, num_rewards=2))
        except CapabilityError:
            continue
        found.append(name)
    return tuple(found)


FIRST = "reinforce_pp_baseline"


REWARDS = (tiny.right, tiny.brief)
"""For all of them: never negative, and in every group one answer or two that have any."""
STEPS = 2
"""Optimizer steps of each objective: the second passes once more over the same rollout."""


class _Rotate(TrainerCallback):
    def __init__(self, trained: Any) -> None:
        self.trained = trained

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % STEPS == 0:
            self.trained.objective = as_objective(fed()[state.global_step // STEPS % len(fed())], args)


class Snapshots(TrainerCallback):
    """The parameters after each objective's steps."""

    def __init__(self, trained: Any) -> None:
        self.trained = trained
        self.taken: dict[str, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % STEPS == 0:
            self.taken[fed()[state.global_step // STEPS - 1]] = tiny.parameters(self.trained)


def rotate(trained: Any) -> None:
    """Give every `STEPS` optimizer steps another registered objective, so that one run covers them all.

    Start with `FIRST`, which makes TRL keep a reference policy, and with ``num_iterations=STEPS``.
    """
    trained.add_callback(_Rotate(trained))
