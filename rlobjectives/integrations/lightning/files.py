"""Folders that every rank knows to be writable before hours are spent on what goes there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlobjectives.distributed import Communicator, Fault
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.whole_files import probe, replacing, write_text

__all__ = ["check_folders", "replacing", "write_text"]


def check_folders(who: str, folders: Sequence[Path], *, writes: bool) -> None:
    """Make folders and try to write to them, before hours are spent on what goes there. One collective.

    Args:
        who: What will write, as the message calls it.
        folders: Where.
        writes: Whether this rank is one that does; the others wait for its verdict.

    Raises:
        CapabilityError: If this rank cannot write. The other ranks raise a `RankError`.
    """
    fault = Fault()
    for folder in folders if writes else ():
        try:
            probe(folder)
        except OSError as error:  # noqa: PERF203  # a handful of folders
            refusal = CapabilityError(
                f"{who} cannot write to {str(folder)!r}: {error.strerror or error}. Give a folder that can be written."
            )
            refusal.__cause__ = error
            fault.note(refusal)
    exchange({}, Communicator.world(), fault=fault)
