"""A run of TRL's GRPOTrainer with the objective: a tiny model that generates, and a checkpoint a step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.faults.injection import active, objective
from tests.integrations.trl import tiny

STEPS = 3


class Policy(ObjectiveGRPOTrainer):
    """A trainer with places where things go wrong."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        active.begin_rollout()
        active.at("sampling")
        return super()._generate_and_score_completions(inputs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda *_: active.at("step"))
        return optimizer


def spoil_forward(trainer: Any) -> None:
    """Put the places of the forward around TRL's own, whose signature stays the one the mixin reads."""
    compute = trainer._get_per_token_logps_and_entropies

    @functools.wraps(compute)
    def computed(*args: Any, **kwargs: Any) -> Any:
        active.at("forward")
        logprobs, *rest = compute(*args, **kwargs)
        if logprobs.requires_grad:
            logprobs.register_hook(lambda gradient: active.at("backward"))
        return active.spoil("logprobs", logprobs), *rest

    trainer._get_per_token_logps_and_entropies = computed


def even(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Even tokens are good; one rank may find something else."""
    active.at("reward")
    found = [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
    return active.spoil("rewards", found)


def run(job: dict[str, Any]) -> Tensor:
    """Train, from the beginning or from a checkpoint."""
    odd = job["fault"].get("name", "") if active.mine else ""
    config = ObjectiveConfig(
        **tiny.options(
            output_dir=job["saves"],
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=1,
            optim="adamw_torch",
            learning_rate=0.1 if odd == "other-rate" else 0.05,
            num_iterations=2 if odd == "other-epochs" else 1,
            per_device_train_batch_size=8 if odd == "other-cut" else 4,
            gradient_accumulation_steps=1 if odd == "other-cut" else 2,
        )
    )
    trainer = tiny.trainer(
        Policy,
        config,
        generated=True,
        reward_funcs=[even, tiny.short],
        objective=objective(clip_high=0.3) if odd == "other-objective" else objective(),
    )
    spoil_forward(trainer)
    trainer.train(resume_from_checkpoint=job["resume"])
    return tiny.parameters(trainer)


def checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("checkpoint-*"), reverse=True)
