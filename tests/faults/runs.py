"""Start runs on the fork server, one at a time, and see how each rank ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.faults.catalogue import Host

__all__ = ["Ended", "Run", "Runner"]

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 300.0
"""Seconds to import everything; generous, since other work may share the cores."""


@dataclass
class Ended:
    """How one rank ended.

    Attributes:
        code: Exit code; minus the signal that killed it; None if it had to be ended at the limit.
        raised: Class of the exception that ended it.
        message: Its message.
        seconds: From the fault (or the start, where there is none during the run) to this rank's end.
    """

    code: int | None
    raised: str = ""
    message: str = ""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it reached the end of the run."""
        return self.code == 0 and not self.raised

    @property
    def words(self) -> str:
        """How it ended, in a line."""
        if self.code is None:
            return "hangs"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        if self.finished:
            return "finishes"
        first = self.message.strip().splitlines()
        said = f": {first[0]}" if first else ""
        return f"{self.raised or 'exit'}{said}" + (f" (exit code {self.code})" if self.code != 1 else "")


@dataclass
class Run:
    """One run: how its ranks ended, and the weights of those that finished.

    Attributes:
        ranks: By rank.
        weights: Of each rank that finished.
        struck: Whether the fault happened.
    """

    ranks: list[Ended]
    weights: list[torch.Tensor] = field(default_factory=list)
    struck: bool = False

    @property
    def seconds(self) -> float:
        """To the end of the last process."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether all ranks reached the end."""
        return all(rank.finished for rank in self.ranks)


class Runner:
    """A fork server and the runs on it.

    Args:
        folder: For logs.
        limit: Seconds after which a run counts as hanging.
    """

    def __init__(self, folder: Path, limit: float = 60.0) -> None:
        self.limit = limit
        self.pending = b""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "server.log").open("w") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.fork_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT,
            )  # fmt: skip
        self.alive: set[int] = set()
        try:
            self.mounts = bool(self._next(time.monotonic() + START_LIMIT)["mounts"])
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        assert self.server.stdin is not None
        self.server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(10.0)
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()

    def run(self, host: Host, logs: Path, saves: Path, **options: Any) -> Run:
        """Run a host's program on all its ranks and wait until all have ended, or have been ended at the limit."""
        logs.mkdir(parents=True, exist_ok=True)
        job = {
            "program": host.program, "strategy": host.strategy, "ranks": host.ranks, "logs": str(logs),
            "saves": str(saves), "port": _free_port(), "limit": self.limit, "fault": {}, "resume": None, **options,
        }  # fmt: skip
        self._send(job)
        pids = self._next(time.monotonic() + self.limit)["started"]
        self.alive.update(pids)
        deadline = time.monotonic() + self.limit
        ends: dict[int, dict[str, Any]] = {}
        while self.alive and (word := self._next(deadline, needed=False)):
            ends[word["ended"]] = word
            self.alive.discard(word["ended"])
        self._stacks()
        hung = set(self.alive)
        self._kill()
        return _gathered(logs, [None if pid in hung else ends[pid] for pid in pids])

    def mount(self, folder: Path, size: str) -> bool:
        """Put a small disk over a folder, where this machine lets us."""
        folder.mkdir(parents=True, exist_ok=True)
        self._send({"mount": str(folder), "size": size})
        return bool(self._next(time.monotonic() + self.limit)["mounted"])

    def unmount(self, folder: Path) -> None:
        """Take the small disk away, with what is on it."""
        self._send({"unmount": str(folder)})
        self._next(time.monotonic() + self.limit)

    def seen_by_ranks(self, folder: Path) -> Path:
        """The same folder with the disks that only the ranks see."""
        return Path(f"/proc/{self.server.pid}/root{folder.resolve()}") if self.mounts else folder

    def _send(self, command: dict[str, Any]) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(command).encode() + b"\n")
        self.server.stdin.flush()

    def _next(self, deadline: float, *, needed: bool = True) -> dict[str, Any]:
        assert self.server.stdout is not None
        while b"\n" not in self.pending:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.server.stdout], [], [], max(0.0, left))
            found = os.read(self.server.stdout.fileno(), 1 << 16) if ready else b""
            if ready and not found:
                raise RuntimeError("the fork server has ended; server.log beside the cells says why")
            if not ready:
                if needed:
                    raise TimeoutError("the fork server does not answer")
                return {}
            self.pending += found
        line, self.pending = self.pending.split(b"\n", 1)
        return dict(json.loads(line))

    def _stacks(self) -> None:
        for pid in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if self.alive:
            time.sleep(0.5)  # the handler writes the stacks into the ranks' logs

    def _kill(self) -> None:
        for pid in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        while self.alive:
            self.alive.discard(self._next(time.monotonic() + 30.0)["ended"])


def _gathered(logs: Path, ends: list[dict[str, Any] | None]) -> Run:
    words = []
    for rank in range(len(ends)):
        path = logs / f"word-{rank}.json"
        words.append(json.loads(path.read_text()) if path.exists() else {})
        end = ends[rank]
        if end is not None and end["code"] > 0 and "raised" not in words[-1]:  # it left without an exception
            words[-1] |= {"raised": "exit", "message": _last_line(logs / f"rank-{rank}.log")}
    began = min((word["began"] for word in words if "began" in word), default=None)
    struck = logs / "struck"
    since = float(struck.read_text()) if struck.exists() else began
    ranks = [
        Ended(
            code=None if end is None else end["code"],
            raised=word.get("raised", ""),
            message=word.get("message", ""),
            seconds=float("inf") if end is None else end["at"] - (end["at"] if since is None else since),
        )
        for end, word in zip(ends, words, strict=True)
    ]
    weights = [torch.load(logs / f"weights-{rank}.pt") for rank, ended in enumerate(ranks) if ended.finished]
    return Run(ranks, weights, struck.exists())


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
