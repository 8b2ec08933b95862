"""Checkpoints of a TRL run: whole or refused by name, with the one before still there and still loading."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import shutil

import torch
from transformers import Trainer

from rlobjectives import CapabilityError, CheckpointError, RLObjectivesError
from rlobjectives.integrations import checkpoint_files
from rlobjectives.integrations.checkpoint_files import BEGUN, MARKER
from rlobjectives.integrations.trl import checkpoint_folder, mixin
from tests.integrations.damage import cut, empty, flip_a_bit, overwrite_with_text
from tests.integrations.trl import tiny
from tests.integrations.trl.test_resume import build
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
# TRL reads it itself; what `pytest.warns` hands on has lost the name of its module, by which it is ignored elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


class KilledError(BaseException):
    """As SIGKILL would: nothing that catches exceptions sees it."""


def kill(*_: Any, **__: Any) -> None:
    raise KilledError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder of an uninterrupted run, and its weights at the end."""
    folder = tmp_path_factory.mktemp("whole")
    trained = build(folder, max_steps=4)
    trained.train()
    return folder, tiny.parameters(trained)


@pytest.mark.parametrize(
    ("place", "name"),
    [(mixin, "save_rollout"), (Trainer, "_save_optimizer_and_scheduler"), (checkpoint_folder, "finish")],
)
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    whole: tuple[Path, torch.Tensor],
    place: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `save_total_limit` too: nothing is removed before the new one is whole."""
    build(tmp_path, max_steps=2, save_total_limit=1).train()
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    with monkeypatch.context() as patched:
        patched.setattr(place, name, kill)
        with pytest.raises(KilledError):
            build(tmp_path, max_steps=3, save_total_limit=1).train(resume_from_checkpoint=True)
    half, before = tmp_path / "checkpoint-3", tmp_path / "checkpoint-2"
    with pytest.raises(CheckpointError, match="is only half there") as caught:
        build(tmp_path, max_steps=4).train(resume_from_checkpoint=str(half))
    assert f"The one before, {str(before)!r}, is whole" in str(caught.value)
    again = build(tmp_path, max_steps=4, save_total_limit=1)
    with pytest.warns(UserWarning, match="passed over: .*checkpoint-3' is only half there"):
        again.train(resume_from_checkpoint=True)
    assert torch.equal(tiny.parameters(again), whole[1])
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


_KILLED = """
import os, signal, sys
from rlobjectives.integrations.trl import checkpoint_folder
from tests.integrations.trl.test_resume import build
from tests.ranks import run_ranks
from pathlib import Path
finish = checkpoint_folder.finish
def finished(folder, **options):
    if folder.name == "checkpoint-3":
        os.kill(os.getpid(), signal.SIGKILL)
    finish(folder, **options)
checkpoint_folder.finish = finished
build(Path(sys.argv[1]), max_steps=4).train()
"""


@pytest.mark.timeout(400)
def test_sigkill_and_resume_end_with_the_very_same_weights(
    whole: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        timeout=380,
        check=False,
    )
    assert dead.returncode == -signal.SIGKILL, dead.stderr[-2000:]
    assert (tmp_path / "checkpoint-3" / BEGUN).exists()
    again = build(tmp_path, max_steps=4)
    with pytest.warns(UserWarning, match="checkpoint-3' is only half there"):
        again.train(resume_from_checkpoint=True)
    assert torch.equal(tiny.parameters(again), whole[1])


@pytest.mark.parametrize("harm", [flip_a_bit, cut, empty, overwrite_with_text, Path.unlink])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_damaged_file_is_named(
    whole: tuple[Path, torch.Tensor], harm: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    for step in (2, 3):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    harm(tmp_path / "checkpoint-3" / file)
    trained = Args(tmp_path)
    with pytest.raises(CheckpointError, match=f"checkpoint-3' is damaged: '{file}' ") as caught:
        checkpoint_folder.checkpoint_to_resume(trained, str(tmp_path / "checkpoint-3"))
    assert "checkpoint-2', is whole" in str(caught.value)
    with pytest.warns(UserWarning, match=f"passed over: .*{file}"):
        assert checkpoint_folder.checkpoint_to_resume(trained, True) == str(tmp_path / "checkpoint-2")


class Args:
    """As much of a trainer as is asked before training."""

    def __init__(self, folder: Path) -> None:
        self.args = self
        self.output_dir, self.local_process_index = str(folder), 0


def test_other_folders_are_judged_by_their_files(whole: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """A checkpoint of TRL itself has no marker, and is resumed from unless its own checksums speak against it."""
    foreign, trained = tmp_path / "checkpoint-3", Args(tmp_path)
    shutil.copytree(whole[0] / "checkpoint-3", foreign)
    (foreign / MARKER).unlink()
    assert checkpoint_folder.checkpoint_to_resume(trained, str(foreign)) == str(foreign)
    cut(foreign / "model.safetensors")
    with pytest.raises(CheckpointError, match="'model.safetensors' has .* its header speaks of"):
        checkpoint_folder.checkpoint_to_resume(trained, str(foreign))
    with pytest.raises(CheckpointError, match="finds no whole checkpoint"):
        checkpoint_folder.checkpoint_to_resume(trained, True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match="is no checkpoint of a Trainer: it has no 'trainer_state.json'"
    ):
        checkpoint_folder.checkpoint_to_resume(trained, str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint_folder.checkpoint_to_resume(trained, str(tmp_path / "checkpoint-9"))


def test_a_lost_marker_is_named(whole: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / MARKER).unlink()
    with pytest.raises(CapabilityError, match="checkpoint-3 has lost its marker"):
        build(tmp_path, save_strategy="no").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    build(tmp_path, max_steps=2, save_total_limit=1).train()
    with (
        no_file_above(4000),
        pytest.raises(
            CheckpointError, match="checkpoint-3' could not be written: .*Older checkpoints are untouched"
        ),
    ):
        build(tmp_path, max_steps=3, save_total_limit=1).train(resume_from_checkpoint=True)
    assert checkpoint_files.trouble_with(tmp_path / "checkpoint-2") == ""


def test_a_checkpoint_made_just_in_time_is_whole_once_transformers_has_made_it(
    whole: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """Its own sign of an unfinished checkpoint lies in the folder meanwhile, and is removed after the marker is written."""
    just_in_time = pytest.importorskip("transformers.trainer_jit_checkpoint")
    shutil.copytree(whole[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    stopped = build(tmp_path, max_steps=2)
    stopped.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    just_in_time.CheckpointManager(stopped).execute_jit_checkpoint()
    assert checkpoint_files.trouble_with(tmp_path / "checkpoint-2") == ""
    (tmp_path / "checkpoint-2" / MARKER).unlink()
    (tmp_path / "checkpoint-2" / "checkpoint-is-incomplete.txt").write_text("in progress")
    assert "is only half there" in checkpoint_files.trouble_with(tmp_path / "checkpoint-2")


def one_full_disk(folder: str) -> str:
    """The error of writing a checkpoint where only rank 1 has no space, and what rank 0 hears of it."""
    with pytest.raises(RLObjectivesError) as error, checkpoint_folder._together(Path(folder)):
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
    return f"{error.type.__name__}: {error.value}"


def test_a_full_disk_of_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    """With its own error where it happened, as everywhere else."""
    first, second = run_ranks(one_full_disk, 2, str(tmp_path), timeout=120)
    assert first.startswith("RankError: rank 1 stopped with CheckpointError: checkpoint"), first
    assert second.startswith("CheckpointError: checkpoint") and "No space left on device" in second


def test_an_output_folder_that_cannot_be_written_is_found_at_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapabilityError, match="output_dir .*file/below' cannot be written"):
        build(tmp_path / "file" / "below")

    def read_only(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rlobjectives.integrations.whole_files.tempfile.TemporaryFile", read_only)
    with pytest.raises(CapabilityError, match="cannot be written: Permission denied"):
        build(tmp_path / "other")
    build(tmp_path / "other", save_strategy="no")
