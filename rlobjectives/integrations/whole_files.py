"""Files that are either whole or not there, and folders that can be written."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["clear_partials", "probe", "replacing", "siblings", "sync", "write_text"]


_ABANDONED_SECONDS = 3600.0
_PARTIAL = r"(-[0-9a-f]{16}\.partial|\.partial-[0-9a-f]{8})"
"""How the temporary names of files, and of folders, end."""


def probe(folder: Path) -> None:
    """Make a folder and write a few bytes into it.

    Raises:
        OSError: If the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"?")


def sync(path: Path) -> None:
    """Have the system put a file, or a folder's list of files, on the disk itself.

    Raises:
        OSError: If the disk cannot take what was written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path, *, keep_suffix: bool = False) -> Iterator[Path]:
    """Give a temporary path beside ``path`` to write to, and move it into place at the end.

    Whoever reads `path` sees the old file or the new one, never half of it, also after a crash of the machine; after
    an exception, the old one. The temporary file is new and this process's own, so nobody can have put a link there.

    Args:
        path: The file to write. Its folder is made.
        keep_suffix: For writers that choose a format by it. Otherwise nobody who lists files by suffix finds half a one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = f".partial{path.suffix}" if keep_suffix else ".partial"
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}{suffix}")
    # Who may read it, the umask says, as for every file that open() makes; tempfile would keep it from one's own group.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def clear_partials(path: Path) -> None:
    """Remove what killed writers have left in a folder.

    Args:
        path: What is about to be written. Temporary files and folders for this name are removed at once, for other names
            of the same suffix after an hour without a write: another run may be at work on those.
    """
    own = re.compile(rf"\.{re.escape(path.name)}{_PARTIAL}")
    other = re.compile(rf"\..*{re.escape(path.suffix)}{_PARTIAL}")
    for found in path.parent.glob(".*.partial*"):
        if own.fullmatch(found.name) or (other.fullmatch(found.name) and _is_abandoned(found)):
            shutil.rmtree(found, ignore_errors=True) if found.is_dir() else found.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    try:
        return time.time() - max(one.stat().st_mtime for one in (path, *path.rglob("*"))) > _ABANDONED_SECONDS
    except FileNotFoundError:  # somebody is at work there
        return False


def siblings(path: Path, ending: str) -> list[Path]:
    """Hidden files and folders beside `path` that have its name and an ending, a pattern."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}{ending}"))


def write_text(path: Path, text: str) -> None:
    """Write a whole text file at once."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
