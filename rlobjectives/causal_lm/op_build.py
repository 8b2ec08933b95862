"""DeepSpeed's shared-memory op: built by one process at a time, whatever became of those that tried before."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["file_lock", "load_shared_memory_op", "remove_stale"]

_LOG = logging.getLogger("rlobjectives")
_LOCK = ".rlobjectives.lock"
_SAY_AFTER_SECONDS = 5.0
_SAY_EVERY_SECONDS = 60.0


def load_shared_memory_op() -> None:
    """Build, or load, DeepSpeed's shared-memory op while no other process does.

    DeepSpeed builds it on first use on a CPU. A build that was killed leaves a file named ``lock``, on which every
    later one would wait for ever. So processes take turns, by a lock of the operating system that ends with its
    holder; whoever has it builds alone, and may delete what a dead build left.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    with file_lock(root, f"DeepSpeed's {builder.NAME}"):
        if not builder.is_compatible(verbose=False):  # DeepSpeed then runs without the op
            return
        remove_stale(root.glob(f"**/{builder.NAME}/lock"))
        builder.load(verbose=False)


@contextlib.contextmanager
def file_lock(root: Path, what: str) -> Iterator[None]:
    """Let one process at a time work in a folder, and say so while others wait.

    Args:
        root: The folder, made where it is missing. One that cannot be written to needs no lock.
        what: What is built there, for the message.

    Raises:
        OSError: If the lock is a link, or not a plain file.
    """
    import fcntl  # absent on Windows, where DeepSpeed has no CPU backend either

    try:
        root.mkdir(parents=True, exist_ok=True)
        # In the folder itself, which is the user's own. A link would have us create or open a file of somebody's choice.
        handle = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # then nobody can build there
            yield
            return
        if error.errno == errno.ELOOP:
            raise OSError(
                f"{root / _LOCK} is a link, which may lead anywhere. Delete it and run again."
            ) from error
        raise
    with os.fdopen(handle, "r+") as lock:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{root / _LOCK} is no plain file. Delete it and run again.")
        began = said = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another process builds or loads
                waited = time.monotonic() - began
                if waited > _SAY_AFTER_SECONDS and (
                    said == began or time.monotonic() - said > _SAY_EVERY_SECONDS
                ):
                    said = time.monotonic()
                    _LOG.warning(
                        "waiting for another process that builds %s in %s, for %.0f s now", what, root, waited
                    )
                time.sleep(0.1)
        yield


def remove_stale(locks: Iterator[Path]) -> None:
    """Delete lock files that no living process holds open. Only for whoever is alone in building.

    Args:
        locks: Files of which a living builder keeps its own open.
    """
    found = list(locks)
    held = _open_files() if found else set()
    for lock in found:
        if lock.resolve() in held:
            continue
        _LOG.warning("deleting %s, which a build that died has left", lock)
        lock.unlink(missing_ok=True)


def _open_files() -> set[Path]:
    """Every file that some process of this user has open, where the operating system tells."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            found.add(Path(os.readlink(link)))
    return found
