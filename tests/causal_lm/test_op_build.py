"""The lock behind which DeepSpeed's op is built: one process at a time, no link followed, nothing left by the dead."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from rlobjectives.causal_lm import op_build
from rlobjectives.causal_lm.op_build import file_lock, remove_stale


def hold(root: str, connection: Any) -> None:
    with file_lock(Path(root), "an op"):
        connection.send("held")
        connection.recv()


def test_who_waits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(str(tmp_path), theirs))
    holder.start()
    assert ours.recv() == "held"
    monkeypatch.setattr(op_build, "_SAY_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(
        "rlobjectives.causal_lm.op_build.time.sleep",
        lambda _: ours.send("go") if caplog.records else None,
    )
    with caplog.at_level(logging.WARNING, "rlobjectives"), file_lock(tmp_path, "an op"):
        holder.join(60.0)
        assert holder.exitcode == 0  # it had left the lock before we got it
    assert f"waiting for another process that builds an op in {tmp_path}" in caplog.text


def test_a_dead_holder_leaves_no_lock(tmp_path: Path) -> None:
    def die() -> None:
        with file_lock(tmp_path, "an op"):
            os._exit(9)

    dead = multiprocessing.get_context("fork").Process(target=die)
    dead.start()
    dead.join(60.0)
    assert dead.exitcode == 9
    with file_lock(tmp_path, "an op"):
        pass


def test_no_link_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / ".rlobjectives.lock").symlink_to(victim)
    with pytest.raises(OSError, match="is a link, which may lead anywhere"), file_lock(root, "an op"):
        pass
    assert victim.read_text() == "precious"


def test_a_lock_is_the_users_own_and_needs_a_folder_to_write_to(tmp_path: Path, monkeypatch: Any) -> None:
    with file_lock(tmp_path / "new", "an op"):
        assert (tmp_path / "new" / ".rlobjectives.lock").stat().st_mode & 0o777 == 0o600

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr("rlobjectives.causal_lm.op_build.os.open", refuse)
    with file_lock(tmp_path, "an op"):  # where nobody can build there is nothing to wait for
        pass


def test_what_a_dead_build_left_goes_at_once_and_a_living_ones_stays(tmp_path: Path) -> None:
    dead, living = tmp_path / "a" / "lock", tmp_path / "b" / "lock"
    for path in (dead, living):
        path.parent.mkdir()
        path.touch()
    with living.open():
        remove_stale(tmp_path.glob("**/lock"))
    assert not dead.exists()
    assert living.exists()
