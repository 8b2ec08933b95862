"""A run that stops between two optimizer steps of a rollout, or while it samples, goes on as if it had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from rlobjectives import CapabilityError, CheckpointError, Objective
from rlobjectives.causal_lm import PromptDataModule
from rlobjectives.integrations.lightning import Experience
from tests.causal_lm.small_model import ROWS, policy, save_small_model
from tests.integrations.lightning.quiet import trainer, weights
from tests.integrations.lightning.runs import SEVERAL, Watched, fit, sampled
from tests.integrations.lightning.toy import ToyPolicy

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),  # several runs share one on purpose
    pytest.mark.filterwarnings("ignore:.*ckpt_path="),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Total length of"),
    pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning"),
]


# Stops inside a rollout.


class Failing(ToyPolicy):
    """Fails in the forward or the rollout of a place in the run, once."""

    def __init__(self, where: str = "", step: int = -1, **options: Any) -> None:
        super().__init__(sampled, **{**SEVERAL, **options})
        self.where, self.at = where, step

    def score(self, micro_batch: Experience) -> Any:
        logprobs, entropy = super().score(micro_batch)
        logprobs = logprobs - 0.1 * torch.rand(logprobs.shape)  # what a step draws must be drawn again
        if self.where == "score" and torch.is_grad_enabled() and self.trainer.global_step == self.at:
            raise ArithmeticError
        return logprobs, entropy

    def rollout(self, batch: torch.Tensor) -> Experience:
        found = super().rollout(batch)
        if self.where == "rollout" and self.trainer.global_step == self.at:
            raise ArithmeticError
        return found

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "step" and self.trainer.global_step == self.at:
            raise ArithmeticError


@pytest.mark.parametrize(("where", "step"), [("score", 0), ("score", 2), ("score", 5), ("rollout", 4)])
def test_a_run_that_failed_between_two_steps_goes_on_from_there(
    where: str, step: int, tmp_path: Path
) -> None:
    """Lightning saves where the error finds it; the step that failed is taken as if nothing had been tried."""
    whole = Failing(seed=3)
    trainer(max_steps=8).fit(whole, DataLoader(torch.arange(4)))
    broken = trainer(max_steps=8, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ArithmeticError):
        broken.fit(Failing(where, step, seed=3), DataLoader(torch.arange(4)))
    again = Failing()
    trainer(max_steps=8).fit(again, DataLoader(torch.arange(4)), ckpt_path=tmp_path / "on_exception.ckpt")
    assert [one["steps"] for one in again.trace] == [one["steps"] for one in whole.trace][-len(again.trace) :]
    assert torch.equal(weights(whole), weights(again))


def test_a_checkpoint_from_inside_an_optimizer_step_is_refused(tmp_path: Path) -> None:
    broken = trainer(max_steps=8, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ArithmeticError):
        broken.fit(Failing("step", 2, seed=3), DataLoader(torch.arange(4)))
    with pytest.raises(CheckpointError, match="inside an optimizer step, where some weights have moved"):
        trainer(max_steps=8).fit(
            Failing(), DataLoader(torch.arange(4)), ckpt_path=tmp_path / "on_exception.ckpt"
        )


def test_a_step_that_was_refused_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of a gradient is looked at after the losses: what they reported comes again with the step."""
    whole = Failing(seed=3)
    trainer(max_steps=4).fit(whole, DataLoader(torch.arange(4)))
    broken = Failing(seed=3)

    def refuse(*_: Any) -> None:
        if broken.trainer.global_step == 1:
            raise ArithmeticError

    monkeypatch.setattr("rlobjectives.integrations.lightning.engine._check_norm", refuse)
    with pytest.raises(ArithmeticError):
        trainer(max_steps=4, callbacks=[OnExceptionCheckpoint(tmp_path)]).fit(
            broken, DataLoader(torch.arange(4))
        )
    monkeypatch.undo()
    again = Failing()
    trainer(max_steps=4).fit(again, DataLoader(torch.arange(4)), ckpt_path=tmp_path / "on_exception.ckpt")
    expected, found = (module.trace[-1]["metrics"] for module in (whole, again))
    assert {name: one for name, one in found.items() if not name.startswith("time/")} == {
        name: one for name, one in expected.items() if not name.startswith("time/")
    }


def test_an_error_before_training_writes_over_no_checkpoint(tmp_path: Path) -> None:
    """Lightning saves after every error, also that of a checkpoint which was refused: the weights are fresh then."""
    broken = trainer(max_steps=8, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ArithmeticError):
        broken.fit(Failing("score", 2, seed=3), DataLoader(torch.arange(4)))
    path = tmp_path / "on_exception.ckpt"
    before = path.read_bytes()
    other = ToyPolicy(sampled, objective=Objective.named("grpo"), **SEVERAL)
    again = trainer(max_steps=8, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with (
        pytest.warns(UserWarning, match="was not written"),
        pytest.raises(CheckpointError, match="the objective was"),
    ):
        again.fit(other, DataLoader(torch.arange(4)), ckpt_path=path)
    assert path.read_bytes() == before


def test_a_rollout_stopped_twice_ends_as_if_it_never_was(tmp_path: Path) -> None:
    """And callbacks see the end of the rollout as the end of a training batch."""
    whole = fit(Watched(seed=3), "single", rollouts=4, max_steps=8)
    fit(Watched(seed=3), "single", rollouts=4, max_steps=1, folder=tmp_path)
    fit(Watched(), "single", rollouts=4, max_steps=3, folder=tmp_path, resume=tmp_path / "step=1.ckpt")
    again = fit(
        Watched(), "single", rollouts=4, max_steps=8, folder=tmp_path, resume=tmp_path / "step=3.ckpt"
    )
    assert sorted(one.name for one in tmp_path.glob("*.ckpt")) == [f"step={n}.ckpt" for n in (1, 3, 4, 8)]
    assert again.begun == [4]
    assert torch.equal(weights(whole), weights(again))


def test_the_same_trainer_goes_on_inside_a_rollout() -> None:
    module, loader = Watched(seed=3), DataLoader(torch.arange(4))
    lasting = trainer(max_steps=2, max_epochs=4)
    lasting.fit(module, loader)
    lasting.fit_loop.epoch_loop.max_steps = 8
    lasting.fit(module, loader)
    assert module.begun == [0, 4]  # the weights are others: Lightning makes a new optimizer for each fit
    trainer(max_steps=1).fit(module, loader)  # of another trainer: a new run
    assert module.begun == [0, 4, 0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"objective": Objective.named("grpo")}, "the objective was estimator=GDPO"),
        ({"ranks": 2}, "the number of ranks was 2 and is 1"),
        ({"odd": True}, r"extra\['odd'\], which holds other things than tensors, numbers and text"),
    ],
)
def test_a_rollout_that_cannot_go_on_is_refused(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    def odd(*_: Any) -> Experience:
        found = sampled(*_)
        return found.replace(extra={"odd": [object()] * 4}) if "odd" in changed else found

    source = ToyPolicy(odd, seed=3, **SEVERAL)
    fit(source, "single", rollouts=4, max_steps=2, folder=tmp_path)
    path = tmp_path / "step=2.ckpt"
    if "ranks" in changed:
        content = torch.load(path, weights_only=True)
        content["rlobjectives"]["unfinished"]["ranks"] = 2
        torch.save(content, path)
    objective = {name: one for name, one in changed.items() if name == "objective"}
    with pytest.raises(CheckpointError, match=named):
        fit(ToyPolicy(sampled, **SEVERAL, **objective), "single", rollouts=4, resume=path)


def test_an_epoch_that_is_over_is_said_to_leave_steps_behind(tmp_path: Path) -> None:
    stopped = trainer(max_steps=2)
    stopped.fit(Watched(seed=3), DataLoader(torch.arange(4)))
    stopped.save_checkpoint(tmp_path / "after.ckpt")
    with pytest.warns(UserWarning, match="ended without taking the optimizer steps that are left"):
        trainer(max_steps=8).fit(Watched(), DataLoader(torch.arange(4)), ckpt_path=tmp_path / "after.ckpt")


# Modules that override a hook of Lightning, which calls nothing of LightningModule, without ``super()``.


class OwnCallbacks(Failing):
    """Adds a callback, and forgets those of the classes before."""

    def configure_callbacks(self) -> list[Callback]:
        return [Callback()]


def test_a_module_that_forgets_the_callbacks_before_it_goes_on_all_the_same(tmp_path: Path) -> None:
    whole = OwnCallbacks(seed=3)
    trainer(max_steps=8).fit(whole, DataLoader(torch.arange(4)))
    broken = trainer(max_steps=8, callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(ArithmeticError):
        broken.fit(OwnCallbacks("score", 2, seed=3), DataLoader(torch.arange(4)))
    again = OwnCallbacks()
    resumed = trainer(max_steps=8, callbacks=[OnExceptionCheckpoint(tmp_path / "more")])
    resumed.fit(again, DataLoader(torch.arange(4)), ckpt_path=tmp_path / "on_exception.ckpt")
    assert torch.equal(weights(whole), weights(again))
    callbacks: Any = vars(resumed)["callbacks"]
    kinds = [type(one).__name__ for one in callbacks]
    assert kinds[-3:] == ["_FinishRollout", "EndTogether", "OnExceptionCheckpoint"]
    resumed.fit_loop.epoch_loop.max_steps = 9
    resumed.fit(again, DataLoader(torch.arange(4)))
    assert [type(one).__name__ for one in vars(resumed)["callbacks"]].count("EndTogether") == 1


def test_options_are_refused_where_the_callbacks_before_are_forgotten() -> None:
    with pytest.raises(CapabilityError, match="needs loss scaling"):
        trainer(precision="16-true").fit(OwnCallbacks(), DataLoader(torch.arange(4)))


class OwnSetup(ToyPolicy):
    """Prepares something, and forgets the set-up of the classes before."""

    def setup(self, stage: str) -> None:
        self.prepared = stage


def test_a_module_that_forgets_the_setup_before_it_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"OwnSetup overrides setup without calling super\(\)\.setup"):
        trainer(max_steps=2).fit(OwnSetup(sampled, **SEVERAL), DataLoader(torch.arange(4)))


# Prompts.


class Prompts(Callback):
    """Which prompts each rollout was made of."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch.prompts)


@pytest.mark.parametrize("place", ["rollout", "steps"])
def test_no_prompt_is_skipped_and_none_is_sampled_twice(place: str, tmp_path: Path) -> None:
    """Interrupted while it samples, or between two steps: every prompt has its turn once."""
    folder = save_small_model(tmp_path / "model")
    options = {"windows_per_rollout": 2, "seed": 3, "learning_rate": 3e-2, "max_new_tokens": 4}

    def run(module: Any, steps: int, **fitting: Any) -> Prompts:
        prompts = Prompts()
        data = PromptDataModule(ROWS, prompts_per_step=2, num_generations=3, seed=0)
        trainer(max_epochs=-1, max_steps=steps, callbacks=[prompts, OnExceptionCheckpoint(tmp_path)]).fit(
            module, data, **fitting
        )
        return prompts

    whole = policy(folder, **options)
    expected = run(whole, 6)
    broken = policy(folder, **options)
    transcribe, calls = broken.transcribe, []

    def failing(*inputs: Any, **named: Any) -> Any:
        calls.append(0)
        if place == "rollout" and len(calls) == 2:
            raise ArithmeticError
        return transcribe(*inputs, **named)

    def stopping(loss: Any) -> None:
        if place == "steps" and broken.trainer.global_step == 3:
            raise ArithmeticError
        type(broken).backward(broken, loss)

    broken.transcribe, broken.backward = failing, stopping
    with pytest.raises(ArithmeticError):
        run(broken, 6)
    again = policy(folder, **options)
    rest = run(again, 6, ckpt_path=tmp_path / "on_exception.ckpt")
    done = 1 if place == "rollout" else 2
    assert rest.seen == expected.seen[done:]
    assert torch.equal(weights(whole.model), weights(again.model))
    assert again.last_rollout is not None
