"""What stands around the objective: TRL's clock, schedules that step by a metric."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer

from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny


def trained(kind: type, config: Any, **extra: Any) -> Any:
    made = tiny.trainer(kind, config, **extra)
    made.train()
    return made


def history(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def test_the_time_of_a_step_holds_its_sampling() -> None:
    pause = 0.3

    def slow(completions: list[str], **_: Any) -> list[float]:
        time.sleep(pause)
        return [float(row == 0) for row in range(len(completions))]

    def level(completions: list[str], **_: Any) -> list[float]:
        time.sleep(pause)
        return [1.0] * len(completions)

    two = tiny.options(max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    for kind, extra in ((GRPOTrainer, {}), (ObjectiveGRPOTrainer, {"objective": "grpo"})):
        times = history(trained(kind, GRPOConfig(**two), reward_funcs=[slow], **extra), "step_time")
        assert len(times) == 2 and min(times) >= pause
    # A step that is skipped has sampled all the same.
    config = ObjectiveConfig(**two, dynamic_sampling="drop")
    skipped = trained(ObjectiveGRPOTrainer, config, reward_funcs=[level], objective="grpo")
    assert history(skipped, "window/skipped") == [1.0, 1.0]
    times = history(skipped, "step_time")
    assert len(times) == 2 and min(times) >= pause
    assert sum(times) <= history(skipped, "train_runtime")[0]


def test_a_schedule_by_a_metric_hears_of_the_evaluation_after_a_skipped_step() -> None:
    config = ObjectiveConfig(
        **tiny.options(
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0},
            eval_strategy="steps",
            eval_steps=1,
        ),
        dynamic_sampling="drop",
    )
    made = trained(
        ObjectiveGRPOTrainer,
        config,
        objective="grpo",
        reward_funcs=[lambda completions, **_: [1.0] * len(completions)],
        eval_dataset=tiny.prompts(2),
    )
    assert history(made, "window/skipped") == [1.0, 1.0, 1.0]
    assert made.lr_scheduler.last_epoch == 3
    assert made.optimizer.param_groups[0]["lr"] < config.learning_rate
