"""Whether a checkpoint is whole: its files against what was noted when it was written, and against themselves.

PyTorch's files are zip archives, which hold a checksum (CRC-32) of each of their parts. So a single file can be judged
by itself, unless PyTorch was told to write none. A checkpoint of several files is a folder with a marker, written last,
that lists them.
"""

from __future__ import annotations

import fnmatch
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlobjectives.errors import CheckpointError
from rlobjectives.integrations.whole_files import sync, write_text

__all__ = ["BEGUN", "MARKER", "begin", "finish", "mark", "refusal", "trouble_with"]

MARKER = "rlobjectives_whole.json"
"""The file of a folder that says which files belong to it; whoever wrote the folder writes it last."""
BEGUN = "_rlobjectives_begun"
"""Stands in a folder that is being written. The underscore keeps it from being uploaded."""
_BEGUN_JUST_IN_TIME = "checkpoint-is-incomplete.txt"
"""The same of transformers' `enable_jit_checkpoint`, which removes it once everything, our marker too, is written."""

_ARCHIVES = (".pt", ".pth", ".ckpt", ".bin")
_CHUNK = 1 << 20
_LARGE = 1 << 24
_THREADS = 4
# What zipfile raises where bytes of an archive are not what they were.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError
)  # fmt: skip


def begin(folder: Path) -> None:
    """Make a folder for a checkpoint and note that it is not whole yet.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(
        folder / BEGUN, "A checkpoint was begun here. Without the other marker, it was never finished.\n"
    )
    (folder / MARKER).unlink(missing_ok=True)


def finish(folder: Path, *, removable: str = "") -> None:
    """Mark a folder that was begun as whole."""
    mark(folder, removable=removable)
    (folder / BEGUN).unlink(missing_ok=True)


def mark(folder: Path, *, removable: str = "") -> None:
    """List a folder's files, with size and checksum, in its marker. What was written is put on the disk first.

    Call it yourself for a checkpoint of an earlier release that you know to be whole.

    Args:
        folder: A checkpoint of several files.
        removable: Pattern of names that people may delete on purpose; without them it is whole, too.

    Raises:
        FileNotFoundError: If there is nothing in it.
        OSError: If the disk cannot take what was written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "note.txt").write_text("first")
        >>> mark(folder)
        >>> trouble_with(folder)
        ''
        >>> _ = (folder / "note.txt").write_text("other")
        >>> trouble_with(folder)
        "is damaged: 'note.txt' is not the file that was written"
    """
    signs = (MARKER, BEGUN, _BEGUN_JUST_IN_TIME)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in signs)
    if not paths:
        raise FileNotFoundError(f"{str(folder)!r} holds no file that could be marked as whole")

    def described(path: Path) -> dict[str, Any]:
        sync(path)
        return _fingerprint(path)

    with ThreadPoolExecutor(_THREADS) as pool:
        notes = list(pool.map(described, paths))
    files = {path.relative_to(folder).as_posix(): note for path, note in zip(paths, notes, strict=True)}
    write_text(folder / MARKER, json.dumps({"format": 1, "files": files, "removable": removable}))


def trouble_with(path: Path, *, contents: bool = True) -> str:
    """What is wrong with a checkpoint, as a message says it; empty if it is whole. Reads every byte once.

    Args:
        path: A file or a folder. A folder without a marker, which someone else has written, is judged by its files.
        contents: False looks at a file's beginning and end alone.

    Example:
        >>> trouble_with(Path("no such file"))
        'does not exist'
    """
    if path.is_dir():
        return _trouble_with_folder(path)
    if not path.is_file():
        return "does not exist"
    return _damage(path, contents=contents)


def refusal(path: Path, trouble: str, earlier: Iterable[Path]) -> CheckpointError:
    """The error that refuses a checkpoint, with the one to take instead.

    Args:
        path: The checkpoint.
        trouble: What is wrong with it.
        earlier: Those written before it, the newest first.
    """
    whole = next((str(other) for other in earlier if not trouble_with(other)), None)
    remedy = f"The one before, {whole!r}, is whole: take that." if whole else "Take an earlier one."
    return CheckpointError(f"checkpoint {str(path)!r} {trouble}. {remedy}")


def _trouble_with_folder(folder: Path) -> str:
    marker = folder / MARKER
    if not marker.is_file():
        if any((folder / sign).exists() for sign in (BEGUN, _BEGUN_JUST_IN_TIME)):
            return "is only half there: its writing was begun and never finished, as after a crash or on a full disk"
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and _judges_itself(path))
        return _first(folder, paths, _damage)
    try:
        listed = json.loads(marker.read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = listed["files"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"is damaged: its marker {MARKER!r} cannot be read ({type(error).__name__})"
    if not files:
        return f"is empty: its marker {MARKER!r} lists no file"

    def judged(path: Path) -> str:
        note = files[path.relative_to(folder).as_posix()]
        if not path.is_file():
            return "" if fnmatch.fnmatch(path.name, listed["removable"]) else "is missing"
        size = path.stat().st_size
        if size != note["size"]:
            return f"has {size:,} bytes and was written with {note['size']:,}"
        damage = _damage(path) if path.suffix in _ARCHIVES else ""
        if damage:
            return damage
        again = _of_table(path) if note["kind"] == "archive" else _of_bytes(path)
        return "" if again == note["crc"] else "is not the file that was written"

    return _first(folder, [folder / name for name in sorted(files)], judged)


def _first(folder: Path, paths: list[Path], judge: Callable[[Path], str]) -> str:
    with ThreadPoolExecutor(_THREADS) as pool:
        verdicts = list(pool.map(judge, paths))
    found = next((pair for pair in zip(paths, verdicts, strict=True) if pair[1]), None)
    return "" if found is None else f"is damaged: {found[0].relative_to(folder).as_posix()!r} {found[1]}"


def _judges_itself(path: Path) -> bool:
    return path.suffix in (*_ARCHIVES, ".safetensors")


def _fingerprint(path: Path) -> dict[str, Any]:
    """Size and checksum. Of a large archive: that of its table of contents, which holds the checksums of its parts.

    So what was written need not be read back at once. An archive without such checksums is.
    """
    size, table = path.stat().st_size, None
    if size > _LARGE and path.suffix in _ARCHIVES and zipfile.is_zipfile(path):
        table = _of_table(path)
    return {
        "kind": "bytes" if table is None else "archive",
        "size": size,
        "crc": _of_bytes(path) if table is None else table,
    }


def _of_table(path: Path) -> int | None:
    """The checksum of an archive's table of contents; None if that holds no checksums."""
    with zipfile.ZipFile(path) as archive:
        if not _has_checksums(archive):
            return None
        table = [f"{one.filename}:{one.file_size}:{one.CRC}" for one in archive.infolist()]
    return zlib.crc32("\n".join(table).encode())


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    """Whether PyTorch wrote checksums: with ``torch.serialization.set_crc32_options(False)`` every one is 0."""
    return any(part.CRC for part in archive.infolist())


def _of_bytes(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _damage(path: Path, *, contents: bool = True) -> str:
    """What is wrong with one file of weights or state, as far as it can be told from itself."""
    size = path.stat().st_size
    if not size:
        return "is empty"
    try:
        with path.open("rb") as file:
            start = file.read(8)
        if path.suffix == ".safetensors":
            return _damage_of_safetensors(path, start, size)
        if not zipfile.is_zipfile(path):
            return _no_archive(start, size)
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip() if contents and _has_checksums(archive) else None
    except _UNREADABLE as error:
        return f"is damaged and cannot be read ({type(error).__name__}: {error})"
    return "" if member is None else f"is damaged: its part {member!r} has another checksum than was written"


def _no_archive(start: bytes, size: int) -> str:
    if start.startswith(b"PK"):
        return (
            f"is no whole checkpoint ({size:,} bytes): its end is missing, as after a crash or on a full disk"
        )
    if start.startswith(b"\x80"):
        return "is a bare pickle and no checkpoint of PyTorch; pickles run code, so it is not opened"
    return f"is no checkpoint: it begins with {start!r}, and PyTorch's files are zip archives"


def _damage_of_safetensors(path: Path, start: bytes, size: int) -> str:
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        return f"is no whole safetensors file ({size:,} bytes): its header is cut"
    with path.open("rb") as file:
        file.seek(8)
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max(ends, default=0)
    return "" if needed == size else f"has {size:,} bytes; its header speaks of {needed:,}"
