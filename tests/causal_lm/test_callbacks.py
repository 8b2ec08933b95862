"""Callbacks: what they show and write, and that files are whole or absent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from rlobjectives import CapabilityError
from rlobjectives.causal_lm import ExportModel, PolicyProgressBar, RunHistory, SaveCompletions, Transcript
from rlobjectives.integrations.whole_files import replacing, write_text

METRICS = {
    "reward/correct/mean": 0.25,
    "reward/correct/std": 0.5,
    "rollout/accuracy": 0.25,
    "policy/kl_to_ref": 0.0123,
    "time/tokens_per_second": 1234.5,
    "optim/grad_norm": 1.0,
    "reward/constant_group_fraction": 0.5,
}


def trainer(tmp_path, step=7, **metrics):
    return SimpleNamespace(
        callback_metrics={name: torch.tensor(value) for name, value in {**METRICS, **metrics}.items()},
        global_step=step,
        is_global_zero=True,
        default_root_dir=str(tmp_path),
        strategy=SimpleNamespace(config={"zero_optimization": {"stage": 3}}),
        world_size=2,
    )


def transcript():
    return Transcript(
        prompts=["1+1=", [{"role": "user", "content": "2+2?"}]],
        completions=["[2]", "five"],
        rewards=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
        scored=torch.tensor([[True, True], [True, False]]),
        reward_names=("correct", "bracketed"),
        ended=torch.tensor([True, False]),
    )


def test_the_progress_bar_shows_reward_accuracy_kl_and_speed():
    shown = PolicyProgressBar().numbers({**METRICS, "val/accuracy": 0.5})
    assert shown == {
        "correct": "0.250",
        "accuracy": "0.250",
        "kl": "0.0123",
        "tok/s": "1,234",
        "val": "0.500",
    }


def test_completions_are_saved_for_programs_and_for_people(tmp_path):
    callback = SaveCompletions(every_n_rollouts=2)
    module = SimpleNamespace(last_rollout=transcript(), last_validation=None)
    for batch_idx in range(2):
        callback.on_train_batch_end(trainer(tmp_path, step=batch_idx), module, None, None, batch_idx)
    callback.on_validation_end(trainer(tmp_path), module)  # nothing was validated, so nothing is written
    files = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert files == ["step_00000000_train.jsonl", "step_00000000_train.txt"]
    lines = (tmp_path / "completions" / files[0]).read_text().splitlines()
    assert json.loads(lines[1])["rewards"] == {"correct": 0.0, "bracketed": None}
    text = (tmp_path / "completions" / files[1]).read_text()
    assert "[user] 2+2?" in text
    assert "cut at the length limit" in text
    assert "bracketed unscored" in text


@pytest.mark.parametrize("counts", [True, False])
def test_rollouts_are_counted_over_epochs_and_resumed_runs(tmp_path, counts):
    """Two epochs of three rollouts, one file every four: the first and the fifth, though each epoch has a first."""
    callback = SaveCompletions(every_n_rollouts=4)
    module = SimpleNamespace(last_rollout=transcript())
    for done in range(1, 7):
        if counts:
            module.rollouts_done = done
        if done == 4:
            resumed = SaveCompletions(every_n_rollouts=4)
            resumed.load_state_dict(callback.state_dict())
            callback = resumed
        callback.on_train_batch_end(trainer(tmp_path, step=done), module, None, None, (done - 1) % 3)
    files = sorted(path.name for path in (tmp_path / "completions").glob("*.txt"))
    assert files == ["step_00000001_train.txt", "step_00000005_train.txt"]


def test_the_history_ends_as_a_file_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    callback = RunHistory(str(tmp_path))
    module = SimpleNamespace(objective=SimpleNamespace(name="gdpo"))
    callback.on_fit_start(trainer(tmp_path), module)
    callback.on_validation_end(trainer(tmp_path, step=0, **{"val/accuracy": 0.1}), module)
    for step in range(1, 4):
        callback.on_train_batch_end(trainer(tmp_path, step=step), module, None, None, step)
    callback.on_validation_end(trainer(tmp_path, step=3, **{"val/accuracy": 0.4}), module)
    resumed = RunHistory(str(tmp_path))
    resumed.load_state_dict(callback.state_dict())
    resumed.on_fit_end(trainer(tmp_path, step=3), module)
    history = json.loads((tmp_path / "history.json").read_text())
    assert history["strategy"] == "deepspeed_stage_3"
    assert [entry["step"] for entry in history["training"]] == [1, 2, 3]
    assert [entry["val/accuracy"] for entry in history["validation"]] == pytest.approx([0.1, 0.4])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "history.json"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "old")

    def fail_half_way() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail_half_way()
    assert path.read_text() == "old"
    assert [one.name for one in path.parent.iterdir()] == ["file.txt"]


CALLBACKS = [
    RunHistory,
    SaveCompletions,
    ExportModel,
    lambda folder=None: ExportModel(critic_folder=folder or "critic"),
]


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch, kind):
    (tmp_path / "file").write_text("in the way")
    module = SimpleNamespace(critic_model=None)
    with pytest.raises(CapabilityError, match="cannot write to '.*file/deeper': .*Give a folder"):
        kind(str(tmp_path / "file" / "deeper")).setup(trainer(tmp_path), module, "fit")
    other = trainer(tmp_path)
    other.is_global_zero = False  # does not write, so does not look; it would hear of rank 0's failure
    kind(str(tmp_path / "file" / "deeper")).setup(other, module, "fit")
    kind(str(tmp_path / "new" / "deeper")).setup(trainer(tmp_path), module, "fit")
    assert (tmp_path / "new" / "deeper").is_dir()
    assert not list((tmp_path / "new" / "deeper").iterdir())

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(CapabilityError, match="No space left"):
        kind(str(tmp_path / "new")).setup(trainer(tmp_path), module, "fit")
