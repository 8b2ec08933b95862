"""What goes wrong, at its place in a host's program.

A program calls `begin_rollout` when a rollout begins, `at(place)` where a fault may strike, and passes what a fault may
spoil through `spoil(place, value)`. Faults strike in the second rollout, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileOpener
from torch import Tensor

from rlobjectives import GDPO, ClippedSurrogate, Objective, PolicyLoss, Rollouts, TokenBatch
from rlobjectives.component import WindowContext
from rlobjectives.token_parts import TokenLoss

__all__ = ["Injection", "active", "interrupt_saves", "objective"]

STRIKES_AT = 2
ROOM_LEFT = 2_000  # bytes on a full disk: not enough for any checkpoint


@dataclasses.dataclass
class Injection:
    """One fault of one run, seen from one rank.

    Attributes:
        action: What is done; empty does nothing.
        place: Where.
        mine: Whether it is this rank that it happens on.
        logs: Where the moment of the fault is noted.
        saves: The checkpoint folder.
        rollouts: Begun so far.
        struck: Whether it has happened.
    """

    action: str = ""
    place: str = ""
    mine: bool = False
    logs: str = ""
    saves: str = ""
    rollouts: int = 0
    struck: bool = False

    def begin_rollout(self) -> None:
        """Count rollouts."""
        self.rollouts += 1

    def due(self, place: str) -> bool:
        """Whether the fault happens here and now; note the moment."""
        due = self.mine and not self.struck and self.rollouts == STRIKES_AT and place == self.place
        if due:
            self.struck = True
            Path(self.logs, "struck").write_text(str(time.monotonic()))
        return due

    def at(self, place: str) -> None:
        """A place at which a process may fail, die, wait, or lose its disk."""
        if self.due(place):
            self.strike()

    def strike(self) -> None:
        """Do it."""
        if self.action == "raise":
            raise ZeroDivisionError(f"nothing works at the {self.place} of this rank")
        if self.action in ("KILL", "TERM"):
            os.kill(os.getpid(), getattr(signal, f"SIG{self.action}"))
        elif self.action == "sleep":
            time.sleep(3.0)
        elif self.action == "remove":
            shutil.rmtree(self.saves)
        elif self.action == "fill":
            self._fill()

    def spoil(self, place: str, value: Any) -> Any:
        """A value that may come out as NaN or too short."""
        if not self.due(place):
            return value
        if self.action == "none":
            return [None, *value[1:]]
        if self.action == "nan":
            if isinstance(value, list):
                return [float("nan"), *value[1:]]
            return value + float("nan")
        return value[:-1] if isinstance(value, list) else value[..., :-1]

    def _fill(self) -> None:
        if not os.path.ismount(self.saves):  # no right to mount a small disk: files may not grow any more
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_LEFT, ROOM_LEFT))
            return
        with Path(self.saves, "other people's file").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


active = Injection()
"""This process's fault; a process is one run."""


class SpoiledGDPO(GDPO):
    """An estimator whose advantages may be NaN."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return active.spoil("advantages", super().estimate(rollouts))


class SpoiledSurrogate(ClippedSurrogate):
    """A loss that may raise."""

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        active.at("loss")
        return super().value_and_slope(tokens, context)


def objective(**loss: Any) -> Objective:
    """The objective of all runs."""
    made: PolicyLoss = SpoiledSurrogate(**loss)
    return Objective(estimator=SpoiledGDPO(), policy_loss=made)


def interrupt_saves() -> None:
    """Let a fault at a save strike when half of a file's bytes are on the disk."""
    whole, write = torch.save, LocalFileOpener.write

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, io.BytesIO) or not active.due("save"):
            whole(obj, f, *args, **kwargs)
            return
        buffer = io.BytesIO()
        whole(obj, buffer, *args, **kwargs)
        with contextlib.nullcontext(f) if hasattr(f, "write") else Path(f).open("wb") as file:
            _in_two_halves(buffer.getvalue(), file.write, file.flush)

    def written(self: Any, data: Any) -> Any:  # how Lightning writes what it has put together in memory
        if len(data) <= ROOM_LEFT or not active.due("save"):
            return write(self, data)
        return _in_two_halves(data, lambda part: write(self, part), self.f.flush)

    torch.save = save
    LocalFileOpener.write = written


def _in_two_halves(data: Any, write: Any, flush: Any) -> int:
    half = len(data) // 2
    write(data[:half])
    flush()
    active.strike()
    write(data[half:])
    return len(data)
