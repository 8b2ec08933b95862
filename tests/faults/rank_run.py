"""One rank of a run: set the fault, run the host's program, and leave word of how it ended."""

from __future__ import annotations

import ctypes
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.injection import active, interrupt_saves

__all__ = ["run"]

_CAPABILITIES_3 = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_OVERRIDES = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


def run(program: Callable[[dict[str, Any]], torch.Tensor], job: dict[str, Any]) -> None:
    """Run a program to its end; an exception ends the process as it would end anybody's.

    Args:
        program: Gives all weights at the end, whole, on every rank.
        job: From the server: rank, ranks, fault, folders and the program's options.
    """
    began, rank, fault = time.monotonic(), job["rank"], job["fault"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    active.action, active.place = fault.get("action", ""), fault.get("place", "")
    active.mine = fault.get("rank", rank) in (rank, None)
    active.logs, active.saves = job["logs"], job["saves"]
    if active.action == "read-only":
        respect_permissions()
    interrupt_saves()
    word: dict[str, Any] = {"began": began}
    try:
        weights = program(job)
    except BaseException as error:
        text = str(error).strip()
        word |= {"raised": type(error).__name__, "message": text, "trace": traceback.format_exc()}
        raise
    else:
        torch.save(weights, Path(job["logs"], f"weights-{rank}.pt"))
    finally:
        Path(job["logs"], f"word-{rank}.json").write_text(json.dumps(word), encoding="utf-8")


def respect_permissions() -> None:
    """Take from this process what lets the superuser write to folders that are read-only."""
    if os.geteuid():
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, sets)
    for low in (0, 1, 2):  # effective, permitted, inheritable
        sets[low] &= ~_OVERRIDES
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
