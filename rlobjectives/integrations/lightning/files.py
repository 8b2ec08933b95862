"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlobjectives.distributed import Communicator, Fault
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.errors import CapabilityError

__all__ = ["check_folders", "replacing", "write_text"]


def check_folders(who: str, folders: Sequence[Path], *, writes: bool) -> None:
    """Make folders and try to write to them, before hours are spent on what goes there. One collective.

    Args:
        who: What will write, as the message calls it.
        folders: Where.
        writes: Whether this rank is the one that does; the others wait for its verdict.

    Raises:
        CapabilityError: If rank 0 cannot write. The other ranks raise a `RankError`.
    """
    fault = Fault()
    for folder in folders if writes else ():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"?")
        except OSError as error:  # noqa: PERF203  # a handful of folders
            refusal = CapabilityError(
                f"{who} cannot write to {str(folder)!r}: {error.strerror or error}. Give a folder that can be written."
            )
            refusal.__cause__ = error
            fault.note(refusal)
    exchange({}, Communicator.world(), fault=fault)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path`` to write to, and move it into place at the end.

    Whoever reads `path` sees the old file or the new one, never half of it; after an exception, the old one.

    Args:
        path: The file to write. Its folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file at once."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
