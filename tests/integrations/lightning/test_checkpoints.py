"""Checkpoints of a Lightning run: whole or refused by name, and found unwritable before training."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from rlobjectives import CapabilityError, CheckpointError
from rlobjectives.integrations.checkpoint_files import trouble_with
from rlobjectives.integrations.lightning.checkpoint_io import WholeCheckpointIO, naming_reads, naming_writes
from tests.integrations.damage import empty, flip_a_bit
from tests.integrations.lightning.quiet import trainer, weights
from tests.integrations.lightning.runs import SEVERAL, Watched, fit, sampled, uneven
from tests.integrations.lightning.toy import ToyPolicy

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),  # several runs share one on purpose
    pytest.mark.filterwarnings("ignore:.*ckpt_path="),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Total length of"),
    pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 (inside a rollout) and 4 (at its end)."""
    folder = tmp_path_factory.mktemp("saved")
    for stop in (2, 4):
        fit(Watched(seed=3), "single", rollouts=4, max_steps=stop, folder=folder)
    return folder


@pytest.fixture
def copies(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The same, to spoil: the one before, and the last."""
    pair = tmp_path / "step=2.ckpt", tmp_path / "step=4.ckpt"
    for one in pair:
        shutil.copy2(saved / one.name, one)
    return pair


# Half, damaged, foreign, empty.


class Malicious:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["RLOBJECTIVES_TEST_TRACE"],))


SPOILED = {
    "flipped": (flip_a_bit, "is damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is no whole checkpoint .5,000 bytes"),
    "empty": (empty, "is empty"),
    "text": (lambda path: path.write_text("weights"), "is no checkpoint: it begins with b'weights'"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Malicious())), "is a bare pickle"),
    "missing": (Path.unlink, "does not exist"),
}


@pytest.mark.parametrize("harm", SPOILED)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_spoiled_checkpoint_is_refused_and_the_one_before_named(
    copies: tuple[Path, Path], harm: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOBJECTIVES_TEST_TRACE", str(tmp_path / "code ran"))
    before, last = copies
    spoil, named = SPOILED[harm]
    spoil(last)
    module = ToyPolicy(sampled, **SEVERAL)
    module.validation_step = lambda *_: None
    with pytest.raises(CheckpointError, match=named) as caught:
        getattr(trainer(), stage)(module, DataLoader(torch.arange(4)), ckpt_path=last)
    assert f"The one before, {str(before)!r}, is whole" in str(caught.value)
    assert not (tmp_path / "code ran").exists()


@pytest.mark.parametrize("address", ["{}", "file://{}"])
def test_no_code_of_a_checkpoint_is_run(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a file here, nor of one at an address, which Lightning opens as a pickle by default."""
    monkeypatch.setenv("RLOBJECTIVES_TEST_TRACE", str(tmp_path / "code ran"))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": Malicious()}, path)
    with pytest.raises(CheckpointError, match="holds objects that only run code can make"):
        trainer().fit(ToyPolicy(uneven), DataLoader(torch.arange(1)), ckpt_path=address.format(path))
    assert not (tmp_path / "code ran").exists()


def test_an_address_is_opened_without_running_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(url: str, **options: Any) -> Any:
        asked.update(options, url=url)
        raise EOFError("nothing there")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    monkeypatch.setattr(torch_io, "get_filesystem", lambda _: SimpleNamespace(exists=lambda _: True))
    with pytest.raises(CheckpointError, match="nothing there"):
        trainer().fit(ToyPolicy(uneven), DataLoader(torch.arange(1)), ckpt_path="http://localhost/evil.ckpt")
    assert asked["weights_only"] is True


def test_checkpoints_of_something_else_are_named(copies: tuple[Path, Path], tmp_path: Path) -> None:
    class Other(ToyPolicy):
        def __init__(self) -> None:
            super().__init__(sampled, **SEVERAL)
            self.net.head = torch.nn.Linear(3, 3)

    with pytest.raises(
        CheckpointError, match=r"weights are not those of Other: .*size mismatch for net.head"
    ):
        trainer().fit(Other(), DataLoader(torch.arange(4)), ckpt_path=copies[1])
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="is no checkpoint of a Lightning trainer"):
        trainer().fit(ToyPolicy(sampled), DataLoader(torch.arange(4)), ckpt_path=tmp_path / "other.ckpt")


# Folders that cannot be written, full disks, kills.


class Silent(Callback):
    """Is there to be stopped before."""

    def on_train_start(self, *_: Any) -> None:
        raise AssertionError("training began")


@pytest.mark.filterwarnings(
    "ignore:checkpoint .* was not written:UserWarning"
)  # by OnExceptionCheckpoint, then
@pytest.mark.parametrize("kind", [ModelCheckpoint, OnExceptionCheckpoint])
def test_a_folder_that_cannot_be_written_is_found_at_set_up(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", tmp_path):
        callback = kind(folder)
        module = ToyPolicy(uneven)
        checks = {"enable_checkpointing": True} if kind is ModelCheckpoint else {}
        with pytest.raises(CapabilityError, match=f"{kind.__name__} cannot write to '{folder}'"):
            trainer(callbacks=[callback, Silent()], **checks).fit(module, DataLoader(torch.arange(1)))
        monkeypatch.setattr("rlobjectives.integrations.whole_files.tempfile.TemporaryFile", read_only)


def test_a_save_that_fails_is_an_error(copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own writer takes a permission that is denied for a success."""

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    before = copies[1].read_bytes()
    monkeypatch.setattr("rlobjectives.integrations.whole_files.os.open", denied)
    with pytest.raises(CheckpointError, match="could not be written: .*Permission denied"):
        WholeCheckpointIO().save_checkpoint({"a": 1}, copies[1])
    monkeypatch.undo()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limit[1]))
    try:
        with pytest.raises(
            CheckpointError, match="could not be written: .*What was there before is untouched"
        ):
            WholeCheckpointIO().save_checkpoint({"a": torch.zeros(9999)}, copies[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert copies[1].read_bytes() == before
    assert sorted(one.name for one in copies[1].parent.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize("naming", [naming_writes, naming_reads])
@pytest.mark.parametrize(
    "lost",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        dist.DistBackendError("NCCL error"),
    ],
)
def test_a_rank_that_is_lost_in_a_sharded_save_is_no_trouble_of_the_disk(
    naming: Any, lost: RuntimeError
) -> None:
    """Whoever catches it in words of a disk never asks the other ranks why one of them stopped."""
    with pytest.raises(type(lost)) as caught, naming(Path("last.ckpt")):
        raise lost
    assert caught.value is lost


def test_nothing_is_written_on_an_error_before_the_first_step_and_that_is_said(tmp_path: Path) -> None:
    """Fresh weights would replace trained ones. Who asks for a file afterwards gets it."""
    broken = trainer(callbacks=[OnExceptionCheckpoint(tmp_path)])
    with (
        pytest.warns(UserWarning, match="on_exception.ckpt' was not written: .*before the first step"),
        pytest.raises(CheckpointError, match="does not exist"),
    ):
        broken.fit(ToyPolicy(uneven), DataLoader(torch.arange(1)), ckpt_path=tmp_path / "none.ckpt")
    assert not list(tmp_path.iterdir())
    broken.save_checkpoint(tmp_path / "asked.ckpt")
    assert trouble_with(tmp_path / "asked.ckpt") == ""


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tests.integrations.lightning.runs import Watched, fit
save, saved = torch.save, []
def killed(content, file, *rest, **options):
    saved.append(file)
    if len(saved) == 3:
        save(content, file, *rest, **options)
        with open(file, "r+b") as half:
            half.truncate(5000)
        os.kill(os.getpid(), signal.SIGKILL)
    save(content, file, *rest, **options)
torch.save = killed
fit(Watched(seed=3), "single", rollouts=4, folder=Path(sys.argv[1]))
"""


@pytest.mark.timeout(300)
def test_sigkill_while_saving_leaves_the_checkpoint_before_and_the_same_end(tmp_path: Path) -> None:
    whole = fit(Watched(seed=3), "single", rollouts=4)
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    dead = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=280, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr[-2000:]
    assert sorted(one.name for one in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=8.ckpt"]
    assert len(list(tmp_path.glob(".step=12.ckpt-*"))) == 1
    again = fit(Watched(), "single", rollouts=4, folder=tmp_path, resume=tmp_path / "step=8.ckpt")
    assert torch.equal(weights(whole), weights(again))
    assert not list(tmp_path.glob(".step=12.ckpt-*"))  # what the dead run has left is cleared away
