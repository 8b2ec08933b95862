"""Settings that the rank tests run on one process, on two, and under ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from rlobjectives import GDPO, GRPO, Objective, PromptMean
from rlobjectives.integrations.trl import checkpoint
from tests.integrations.trl import tiny
from tests.integrations.trl.parts import FIRST, REWARDS, STEPS, MeanDrift, fed, rotate


@dataclass(frozen=True)
class Setting:
    """Options of the one-process run; ranks divide its batch size.

    Attributes:
        options: Of `GRPOConfig`.
        objective: The objective.
        spoil: Changes the trainer before it trains.
        fails: An error is the expected outcome.
        reference: The model comes from a folder, so that TRL can make a reference policy.
        rewards: Reward functions; those of `tiny` by default.
        evaluated: Prompts of an evaluation at the end; 0 for none.
        modes: Where it runs.
    """

    options: dict[str, Any] = field(default_factory=dict)
    objective: Any = "gdpo"
    spoil: Callable[[Any], None] | None = None
    fails: bool = False
    reference: bool = False
    rewards: tuple[Any, ...] = ()
    evaluated: int = 0
    modes: tuple[str, ...] = ("ddp", "zero3")


def mask_rows(chosen: Callable[[Any, int], list[int]]) -> Callable[[Any], None]:
    """Mask all tokens of the global rows that ``chosen(trainer, count)`` names."""

    def spoil(trained: Any) -> None:
        scored = trained._generate_and_score_completions

        def masked(inputs: Any) -> dict[str, Any]:
            output = scored(inputs)
            count = output["completion_mask"].shape[0]
            start = trained.accelerator.process_index * count
            rows = chosen(trained, count * trained.accelerator.num_processes)
            mine = torch.tensor([start + row in rows for row in range(count)]).unsqueeze(1)
            # A mask of its own, so that the forward sees the same tokens as ever.
            output["tool_mask"] = torch.where(mine, 0, torch.ones_like(output["completion_mask"]))
            return output

        trained._generate_and_score_completions = masked

    return spoil


def everything_at_first(trained: Any, count: int) -> list[int]:
    return list(range(count)) if trained.state.global_step == 0 else []


def first_half(trained: Any, count: int) -> list[int]:
    return list(range(count // 2))


def nan_on_rank_one(trained: Any) -> None:
    trained.self_test = False  # which would say so before the window does
    compute = trained._get_per_token_logps_and_entropies

    def broken(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        logprobs, *rest = compute(*args, **kwargs)
        return (logprobs * float("nan") if trained.accelerator.process_index else logprobs), *rest

    trained._get_per_token_logps_and_entropies = broken


def own_generate(trained: Any) -> None:
    """Let the self-test use the model's `generate`, although a fixed rollout samples."""
    trained._generates = True


def padded_on_rank_one(trained: Any) -> None:
    """Scores that depend on padding, on one rank alone."""
    compute = trained._get_per_token_logps_and_entropies

    def padded(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        logprobs, *rest = compute(*args, **kwargs)
        padding = (kwargs["attention_mask"] == 0).sum(1, keepdim=True)
        return logprobs - 0.1 * padding * trained.accelerator.process_index, *rest

    trained._get_per_token_logps_and_entropies = padded


def flat_at_first(trained: Any) -> None:
    """Every other round the prompts with an even number carry no signal; the same on any number of ranks."""
    rounds = {"made": 0}

    def even(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rounds["made"] += 1
        flat = rounds["made"] % 2 == 1
        return [
            1.0 if flat and int(prompt.split()[0][1:]) % 2 == 0 else float(ids[0] % 7)
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]

    trained.reward_funcs = [even]


def resumed(*, loses_a_file: bool) -> Callable[[Any], None]:
    """A checkpoint inside a rollout, from which the run goes on; one rank may not find its part of it."""

    def spoil(trained: Any) -> None:
        accelerator, once = trained.accelerator, trained.train
        trained.args.output_dir = gather_object([trained.args.output_dir])[0]

        def train() -> None:
            once()
            folder = str(Path(trained.args.output_dir, "checkpoint-1"))
            accelerator.wait_for_everyone()
            if loses_a_file and accelerator.process_index == 1:
                Path(checkpoint.rollout_file(folder, 1)).unlink()
            accelerator.wait_for_everyone()
            trained._step, trained._buffered_inputs = 0, None  # all of it must come from the file
            trained.args.max_steps = 3
            once(resume_from_checkpoint=folder)

        trained.train = train

    return spoil


DECAY = {"weight_decay": 0.5, "learning_rate": 0.1, "lr_scheduler_type": "linear"}
RESUMED = {
    "max_steps": 1,
    "num_iterations": 4,
    "learning_rate": 0.1,
    "save_strategy": "steps",
    "save_steps": 1,
}
DRIFT = Objective(estimator=GDPO(), policy_loss=MeanDrift())
PROMPTS = Objective(estimator=GRPO(), reduction=PromptMean())

SETTINGS: dict[str, Setting] = {
    # Each objective for two steps on one rollout, so that the second is off policy.
    "every_objective": Setting(
        {"max_steps": STEPS * len(fed()), "num_iterations": STEPS, "learning_rate": 0.05},
        objective=FIRST,
        spoil=rotate,
        rewards=REWARDS,
        reference=True,
    ),
    # Twelve sequences to evaluate, eight at a time: two ranks fill up the last batch from the beginning.
    "evaluation": Setting(
        {
            "max_steps": 1,
            "do_eval": True,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 8,
            "learning_rate": 0.0,
        },
        objective={"name": "rloo"},
        evaluated=3,
    ),
    # One prompt's four completions on two ranks, two passes, two micro-batches.
    "split_groups": Setting(
        {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "learning_rate": 0.1,
        },
        objective=PROMPTS,
    ),
    "prepass": Setting({"max_steps": 2, "num_iterations": 2, "learning_rate": 0.1}, objective=DRIFT),
    "empty": Setting(
        {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, **DECAY},
        spoil=mask_rows(everything_at_first),
    ),
    "one_rank_masked": Setting({"max_steps": 1}, spoil=mask_rows(first_half)),
    # Groups without signal on one rank, on the other, on both: all ranks drop and resample the same ones.
    "drop": Setting(
        {"max_steps": 3, "learning_rate": 0.1, "dynamic_sampling": "drop"},
        objective="grpo",
        spoil=flat_at_first,
        rewards=(tiny.even,),
    ),
    # One group a round, half of it on each rank.
    "resample": Setting(
        {
            "max_steps": 4,
            "learning_rate": 0.1,
            "dynamic_sampling": "resample",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
        objective="grpo",
        spoil=flat_at_first,
        rewards=(tiny.even,),
    ),
    "resumed": Setting(RESUMED, objective="grpo", spoil=resumed(loses_a_file=False), modes=("ddp",)),
    "lost_file": Setting(
        RESUMED, objective="grpo", spoil=resumed(loses_a_file=True), fails=True, modes=("ddp",)
    ),
    "tested_with_generate": Setting({"max_steps": 1, "learning_rate": 0.1}, spoil=own_generate),
    "fails_its_test": Setting({"max_steps": 1}, spoil=padded_on_rank_one, fails=True),
    # Last, because it stops half-way through a step.
    "nan_on_one_rank": Setting(
        {"max_steps": 1}, objective="grpo", spoil=nan_on_rank_one, fails=True, modes=("ddp",)
    ),
}


def made_of(setting: Setting) -> dict[str, Any]:
    """What the trainer is given besides its configuration."""
    found: dict[str, Any] = {"objective": setting.objective}
    if setting.reference:
        found["model"] = tiny.saved()
    if setting.rewards:
        found["reward_funcs"] = list(setting.rewards)
    if setting.evaluated:
        found["eval_dataset"] = tiny.prompts(setting.evaluated)
    return found


def history(trained: Any) -> list[dict[str, float]]:
    """Log lines of windows and of evaluations."""
    return [entry for entry in trained.state.log_history if "window/tokens" in entry or "eval_loss" in entry]


def reference(setting: Setting) -> Any:
    """The one-process run."""
    from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer

    config = ObjectiveConfig(**tiny.options(**setting.options))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, **made_of(setting))
    if setting.spoil is not None:
        setting.spoil(trained)
    trained.train()
    return trained
