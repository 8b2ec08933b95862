"""Ways to spoil a file of a checkpoint."""

from __future__ import annotations

import zipfile
from pathlib import Path


def flip_a_bit(path: Path) -> None:
    """In the middle of a file; of an archive, in the middle of its largest part."""
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            part = max(archive.infolist(), key=lambda one: one.file_size)
        start = part.header_offset
        lengths = (int.from_bytes(content[start + at : start + at + 2], "little") for at in (26, 28))
        place = start + 30 + sum(lengths) + part.file_size // 2
    content[place] ^= 0x10
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    """Keep the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    """Keep nothing."""
    path.write_bytes(b"")


def overwrite_with_text(path: Path) -> None:
    """Of the same length."""
    path.write_text("x" * path.stat().st_size)
