"""A checkpoint inside a rollout: the same next steps under the same settings, an error that says why under others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from transformers import TrainerCallback
from trl import GRPOConfig

from rlobjectives import CapabilityError
from rlobjectives.integrations.checkpoint_files import MARKER
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer, checkpoint, checkpoint_folder
from tests.integrations.trl import tiny

SHAPE = {
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.05,
    "optim": "adamw_torch",
    "per_device_train_batch_size": 4,
}
"""Four steps to a rollout: step 3 is inside one, step 4 ends it."""


def build(folder: Path, objective: Any = "gdpo", **changed: Any) -> Any:
    config = GRPOConfig(**tiny.options(**{**SHAPE, "output_dir": str(folder), **changed}))
    return tiny.trainer(
        ObjectiveGRPOTrainer,
        config,
        objective=objective,
        generated=True,
        model=tiny.model(changed.get("seed", 0)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("resumed")
    trained = build(where)
    trained.train()
    torch.save((tiny.parameters(trained), losses(trained)), where / "whole.pt")
    return where


def losses(trained: Any) -> list[float]:
    return [entry["loss/total"] for entry in trained.state.log_history if "loss/total" in entry]


def sequences(trained: Any) -> list[float]:
    return [entry["window/sequences"] for entry in trained.state.log_history if "window/sequences" in entry]


@pytest.mark.parametrize("step", [3, 4])
def test_the_same_next_steps(folder: Path, step: int, tmp_path: Path) -> None:
    """Inside a rollout and at the end of one; the next is sampled in both."""
    whole, lost = torch.load(folder / "whole.pt")
    again = build(tmp_path, save_strategy="no")
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert torch.equal(whole, tiny.parameters(again))
    assert lost[step:] == losses(again)[-(6 - step) :]


@pytest.mark.parametrize("step", [2, 3])
def test_the_same_next_steps_in_the_second_epoch(step: int, tmp_path: Path) -> None:
    """At its beginning and inside it: its prompts come in their own order, which is not that of the first."""
    epochs = {
        "per_device_train_batch_size": 16,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "max_steps": 5,
    }
    whole = build(tmp_path, **epochs)
    whole.train()
    again = build(tmp_path, save_strategy="no", **epochs)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert whole.state.epoch == 2.5
    assert torch.equal(tiny.parameters(whole), tiny.parameters(again))


class SavesBeforeTheOptimizer(TrainerCallback):
    """As `enable_jit_checkpoint` does when the machine is about to be taken away."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


@pytest.mark.parametrize(("accumulation", "sampled_at"), [(1, []), (3, [4, 8])])
def test_a_step_that_was_not_taken_is_taken_again(
    accumulation: int, sampled_at: list[int], tmp_path: Path
) -> None:
    """Inside a rollout, also with a step that ends it and begins the next."""

    def made() -> tuple[Any, list[int]]:
        trained = build(tmp_path, gradient_accumulation_steps=accumulation, save_strategy="no", max_steps=3)
        sample, places = trained._generate_and_score_completions, []

        def noted(inputs: Any) -> Any:
            places.append(trained._step)
            return sample(inputs)

        trained._generate_and_score_completions = noted
        return trained, places

    whole, places = made()
    saves = SavesBeforeTheOptimizer(1)
    saves.trainer = whole
    whole.add_callback(saves)
    whole.train()
    assert places == [0, *sampled_at]
    again, places = made()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert places == sampled_at
    assert again._step == whole._step == 3 * accumulation
    if not sampled_at:  # else by chance
        assert torch.equal(tiny.parameters(whole), tiny.parameters(again))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps_per_generation": 4}, "steps_per_generation was 2 and is 4"),
        ({"num_iterations": 1}, "num_iterations was 2 and is 1"),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size was 4 and is 8"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1 and is 2"),
        ({"num_generations": 2}, "num_generations was 4 and is 2"),
        ({"temperature": 0.7}, "temperature was 1.0 and is 0.7"),
        ({"max_grad_norm": 0.5}, "max_grad_norm was 0.0 and is 0.5"),
        ({"objective": "grpo"}, r"objective was estimator=GDPO\("),
        ({"objective": {"name": "gdpo", "policy_loss": {"clip_high": 0.3}}}, "clip_high=0.3"),
    ],
)
def test_a_rollout_of_other_settings_is_refused(
    folder: Path, changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    trained = build(tmp_path, **{"save_strategy": "no", **changed})
    with pytest.raises(CapabilityError, match=named) as caught:
        trained.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert "or delete every" in str(caught.value)
    assert trained.state.global_step == 3


def test_a_rollout_that_is_used_up_binds_nobody(folder: Path, tmp_path: Path) -> None:
    changed = {"per_device_train_batch_size": 8, "steps_per_generation": 3, "save_strategy": "no"}
    trained = build(tmp_path, "grpo", **changed)
    trained.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    # transformers 4 goes on with the checkpoint's batch size, whatever the configuration says.
    assert sequences(trained)[-2:] == [trained._train_batch_size] * 2
    assert trained._generation > 1


def test_without_its_files_a_new_rollout_is_sampled(tmp_path: Path) -> None:
    build(tmp_path, max_steps=3).train()
    for file in (tmp_path / "checkpoint-3").glob("rollout_*.pt"):
        file.unlink()
    trained = build(tmp_path, per_device_train_batch_size=8, max_steps=5, save_strategy="no")
    trained.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sequences(trained)[-2:] == [trained._train_batch_size] * 2


def test_a_rank_without_its_file_stops_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on alone: neither the rank that has a rollout, nor the one that has not."""
    step = str(folder / "checkpoint-3")
    other = ("", False, False, "", 0)
    monkeypatch.setattr(checkpoint, "said_by_ranks", lambda mine: [mine, other])
    with pytest.raises(CapabilityError, match=r"rank 1 does not find its part .* Raised on all 2 ranks"):
        build(tmp_path, save_strategy="no").train(resume_from_checkpoint=step)
    broken = ("rollout_1.pt cannot be read: EOFError", False, False, "", 0)
    monkeypatch.setattr(checkpoint, "said_by_ranks", lambda mine: [mine, broken])
    with pytest.raises(CapabilityError, match=r"rank 1: rollout_1.pt cannot be read"):
        build(tmp_path, save_strategy="no").train(resume_from_checkpoint=step)


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only this rank sees it: each machine verifies the files that it has."""
    build(tmp_path, max_steps=3).train()
    (tmp_path / "checkpoint-3" / "rollout_0.pt").write_bytes(b"PK")
    (tmp_path / "checkpoint-3" / MARKER).unlink()
    monkeypatch.setattr(checkpoint_folder, "trouble_with", lambda path: "")
    with pytest.raises(CapabilityError, match=r"rank 0: .*rollout_0.pt cannot be read"):
        build(tmp_path, save_strategy="no").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_another_number_of_ranks_is_named() -> None:
    stored, now = ({"world_size": ranks} for ranks in (2, 4))
    everywhere = [("", True, True, checkpoint.differences(stored, now), 3), ("", False, False, "", 0)]
    with pytest.raises(CapabilityError, match="world_size was 2 and is 4"):
        checkpoint._refuse("checkpoint-3", everywhere)
