"""Checkpoints of several files and ranks: put in place whole, told apart by run, and nothing left of failed saves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.api import CheckpointException

from rlobjectives import CheckpointError
from rlobjectives.integrations.checkpoint_files import BEGUN, MARKER, begin, mark, trouble_with
from rlobjectives.integrations.lightning.checkpoints import CheckpointGuard, _check_whole, _put_in_place
from rlobjectives.integrations.whole_files import clear_partials


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
