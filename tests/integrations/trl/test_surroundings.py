"""What stands around the objective: TRL's clock, schedules by a metric, a user's own methods, environments."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
import trl
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from rlobjectives import CapabilityError
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer, ObjectiveMixin
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


def test_rewards_of_a_users_own_class_are_the_ones_in_use() -> None:
    """A subclass that shapes the matrix, as TRL users do it, and an instance whose method was replaced."""

    class Shaped(ObjectiveMixin, GRPOTrainer):
        objective = "grpo"

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
            return super()._calculate_rewards(*args, **kwargs).clamp_max(0.25)

    config = GRPOConfig(**tiny.options(max_steps=1))
    made = trained(Shaped, config)
    assert history(made, "reward/even/mean") == pytest.approx(history(made, "rewards/even/mean"))
    assert float(made._rewards.nan_to_num().max()) == 0.25
    assert "_calculate_rewards" not in vars(made)
    plain = tiny.trainer(ObjectiveGRPOTrainer, config, objective="grpo")
    usual = plain._calculate_rewards
    plain._calculate_rewards = replaced = lambda *args, **kwargs: usual(*args, **kwargs).clamp_max(0.25)
    plain.train()
    assert torch.equal(tiny.parameters(plain), tiny.parameters(made))
    assert plain._calculate_rewards is replaced

    class Alone(ObjectiveMixin, GRPOTrainer):
        objective = "grpo"

        def _calculate_rewards(self, inputs: Any, *_: Any) -> Tensor:
            return torch.zeros(len(inputs), 2)

    with pytest.raises(CapabilityError, match=r"Alone._calculate_rewards does not call super"):
        trained(Alone, config)


def test_a_loss_of_a_users_own_class_is_not_dropped() -> None:
    class Penalised(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return super()._compute_loss(model, inputs) + 1.0

    with pytest.raises(CapabilityError, match=r"class Trainer: Penalised._compute_loss would have no effect"):

        class Trainer(ObjectiveMixin, Penalised):
            objective = "grpo"

    class Added(ObjectiveMixin, GRPOTrainer):
        objective = "grpo"

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return super()._compute_loss(model, inputs) + 1.0

    config = GRPOConfig(**tiny.options(max_steps=1))
    (loss,) = history(trained(Added, config), "loss")
    assert loss == pytest.approx(1.0, abs=1e-4)

    class Elsewhere(ObjectiveMixin, GRPOTrainer):
        objective = "grpo"

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return GRPOTrainer._compute_loss(self, model, inputs)

    before = tiny.parameters(tiny.trainer(GRPOTrainer, config))
    made = tiny.trainer(Elsewhere, config)
    with pytest.raises(CapabilityError, match="the loss of Elsewhere did not ask the objective"):
        made.train()
    assert torch.equal(before, tiny.parameters(made))


class Room:
    """An environment that scores what happened in it."""

    def reset(self, **_: Any) -> None:
        return None

    def look(self, place: int) -> int:
        """Look.

        Args:
            place: Where.
        """
        return place

    def get_reward(self) -> float:
        return 0.5


@pytest.mark.skipif(
    "get_reward" not in inspect.getsource(GRPOTrainer.__init__),
    reason="environments of this TRL have no rewards",
)
def test_a_reward_of_an_environment_weighs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 5) for ids in completion_ids]

    words = tiny.tokenizer()
    words.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    asked = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{row}"}] for row in range(8)]})

    def made(kind: type, loss: dict[str, Any], **extra: Any) -> Any:
        return trained(
            kind,
            GRPOConfig(**tiny.options(max_steps=2, reward_weights=[2.0], **loss)),
            model=tiny.model(max_position_embeddings=2048),
            reward_funcs=[parity],
            train_dataset=asked,
            processing_class=words,
            environment_factory=Room,
            generated=True,
            **extra,
        )

    stock = made(GRPOTrainer, {"loss_type": "grpo"})
    ours = made(ObjectiveGRPOTrainer, {}, objective={"name": "grpo", "estimator": {"epsilon": 1e-4}})
    assert ours.objective.estimator.weights == (2.0, 1.0)
    assert history(ours, "reward/Room/mean") == [0.5, 0.5]
    assert float((tiny.parameters(stock) - tiny.parameters(ours)).abs().max()) <= 1e-6
