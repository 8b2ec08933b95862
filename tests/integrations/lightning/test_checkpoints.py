"""Checkpoints of a Lightning run: whole or refused by name, and found unwritable before training."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader

from rlobjectives import CapabilityError, CheckpointError
from rlobjectives.integrations.checkpoint_files import BEGUN, MARKER, begin, mark, trouble_with
from rlobjectives.integrations.lightning.checkpoint_io import WholeCheckpointIO, naming_reads, naming_writes
from rlobjectives.integrations.lightning.checkpoints import CheckpointGuard, _check_whole, _put_in_place
from rlobjectives.integrations.whole_files import clear_partials
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
    "lost", [RuntimeError("Connection closed by peer [127.0.0.1]:1234"), dist.DistBackendError("NCCL error")]
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


def test_a_folder_that_is_replaced_is_there_before_and_after(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("last.ckpt", ".last.ckpt.partial-1", "step=1.ckpt"))
    for number, folder in enumerate((old, new, other)):
        folder.mkdir()
        (folder / "weights.bin").write_text(str(number))
        mark(folder)
    _put_in_place(new, old)
    assert (old / "weights.bin").read_text() == "1"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt"]
    assert (old / MARKER).is_file()
    assert "weights.bin" in trouble_with(other)  # no archive


def folder_of(path: Path, content: str = "weights") -> Path:
    path.mkdir()
    (path / "weights.txt").write_text(content)
    mark(path)
    return path


def test_what_was_put_aside_is_recommended_only_if_it_is_whole(tmp_path: Path) -> None:
    first, second = (folder_of(tmp_path / f".last.ckpt.replaced-{token}") for token in ("aaaa", "bbbb"))
    with pytest.raises(CheckpointError, match=r"is whole: rename '.*replaced-....' to 'last.ckpt'"):
        _check_whole(tmp_path / "last.ckpt")
    (second / "weights.txt").write_text("w")
    with pytest.raises(CheckpointError, match=r"rename '.*replaced-aaaa' to 'last.ckpt'"):
        _check_whole(tmp_path / "last.ckpt")
    (first / "weights.txt").unlink()
    with pytest.raises(CheckpointError, match="last.ckpt' does not exist. Take an earlier one"):
        _check_whole(tmp_path / "last.ckpt")


def test_what_killed_saves_left_is_cleared_away(tmp_path: Path) -> None:
    """Of the same name at once, of others once nobody has written to it for an hour; nobody else's files at all."""
    hour_ago = time.time() - 4000
    names = {
        "dead file": ".step=8.ckpt-0123456789abcdef.partial",
        "dead folder": ".step=8.ckpt.partial-01234567",
        "same file": ".step=9.ckpt-0123456789abcdef.partial",
        "same folder": ".step=9.ckpt.partial-01234567",
        "busy": ".step=7.ckpt.partial-01234567",
        "another's": ".step=8.ckpt-mine.partial",
        "text": ".notes.txt-0123456789abcdef.partial",
    }
    for who, name in names.items():
        file = folder_of(tmp_path / name) / "weights.txt" if "file" not in who else tmp_path / name
        file.write_text("weights")
        if "same" not in who:
            for one in (*file.parent.iterdir(), file, tmp_path / name):
                os.utime(one, (hour_ago, hour_ago))
    (tmp_path / names["busy"] / "weights.txt").write_text("more weights")
    clear_partials(tmp_path / "step=9.ckpt")
    assert {one.name for one in tmp_path.iterdir()} == {names[one] for one in ("busy", "another's", "text")}


class Sharded:
    """A strategy whose ranks write their own files into a folder, as much as a guard asks of it."""

    def __init__(self, rank: int = 0, writes: Any = None) -> None:
        self.global_rank, self.local_rank, self.writes = rank, 0, writes
        self.load_checkpoint = self.load_model_state_dict = self.save_checkpoint

    def save_checkpoint(self, _: Any, folder: Path, **__: Any) -> None:
        self.writes(folder)

    def broadcast(self, _: Any) -> Any:
        return str(self.path), "01234567"

    def save(self, path: Path) -> None:
        self.path = path
        guard = CheckpointGuard(SimpleNamespace(), SimpleNamespace(strategy=self, state=SimpleNamespace()))
        guard._save_folder({}, path)


def test_a_sharded_save_that_fails_on_all_ranks_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "half.distcp").write_text("half")
        raise CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})

    path = folder_of(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="on rank 1, OSError: .*No space left"):
        Sharded(writes=full).save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]
    assert trouble_with(path) == ""


def test_a_folder_that_cannot_be_put_in_place_leaves_the_one_before(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "last.ckpt")
    with pytest.raises(FileNotFoundError):
        _put_in_place(tmp_path / "nothing", path)
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_machine_learns_before_the_save_whether_it_shares_the_disk(tmp_path: Path) -> None:
    """Afterwards a network disk may still show what rank 0 has renamed, or a folder that is empty."""
    path, partial = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.partial-01234567"

    def written_and_renamed(folder: Path) -> None:
        assert folder == partial
        (folder / "rank_1.distcp").write_text("shard")
        begun = (folder / BEGUN).exists()
        mark(folder)
        if begun:
            (folder / BEGUN).unlink()
        _put_in_place(folder, path)
        partial.mkdir()  # what the second machine still sees

    begin(partial)  # by rank 0
    Sharded(rank=1, writes=written_and_renamed).save(path)
    assert trouble_with(path) == ""
    assert (path / "rank_1.distcp").read_text() == "shard"
    partial.rmdir()
    # A disk of its own: there is no folder yet.
    Sharded(rank=1, writes=lambda folder: (folder / "rank_1.distcp").write_text("another")).save(path)
    assert (path / "rank_1.distcp").read_text() == "another"
    assert trouble_with(path) == ""
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_rollout_of_an_earlier_run_at_the_same_step_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """A run killed between the file of one rank and the checkpoint itself leaves the pair of before as it was."""
    path = tmp_path / "last.ckpt"

    def guard_of(run: str, content: str) -> Any:
        module = SimpleNamespace(unfinished_here=lambda: {"content": content})
        state = SimpleNamespace(fn=TrainerFn.FITTING)
        guard = CheckpointGuard(module, SimpleNamespace(strategy=Sharded(1), state=state, world_size=2))
        guard.run = run
        return guard

    def checkpoint() -> dict[str, Any]:
        return {"rlobjectives": {"unfinished": {"step": 2, "ranks": 2, "trouble": ""}}}

    first, second = checkpoint(), checkpoint()
    guard_of("aaaa", "first")._put_rollout(first, path)
    guard_of("bbbb", "second")._put_rollout(second, path)
    loading = guard_of("cccc", "")
    loading._get_rollout(first, path)
    assert first["rlobjectives"]["unfinished"]["here"] == {"content": "first"}
    third = checkpoint()
    third["rlobjectives"]["unfinished"]["run"] = "dddd"
    with pytest.raises(CheckpointError, match="this rank's part of it, .* does not exist"):
        loading._get_rollout(third, path)
    spoiled = checkpoint()
    spoiled["rlobjectives"]["unfinished"]["trouble"] = "it holds objects"
    guard_of("bbbb", "second")._forget_rollouts(second, path)
    assert len(list((tmp_path / "last.ckpt.rollout").iterdir())) == 1
    guard_of("bbbb", "")._forget_rollouts(spoiled, path)
    assert not list((tmp_path / "last.ckpt.rollout").iterdir())
