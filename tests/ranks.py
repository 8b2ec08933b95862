"""Run a function on several real gloo processes, with a limit after which a hang is a failure.

    results = run_ranks(function, 2, argument)       # [value of rank 0, value of rank 1]

`function` is a module-level function of any test module; it runs on every rank inside an initialised process
group. Arguments and results are pickled. Rank processes start once a world size and then serve every test: a
fresh interpreter and `import torch` cost seconds on a small machine, a call costs milliseconds. After an error
the ranks meet in a new process group; after a hang or a death they are started anew. Rank processes are forks of a
server that has imported torch and done nothing else: as clean as spawned ones, without importing torch each time.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.rank_worker import RemoteError, serve

START_LIMIT = 120.0
"""Seconds for cold rank processes to import torch and meet; generous, since other work may share the cores."""
GRACE = 10.0
"""Seconds that the other ranks get to answer once one rank has raised; they may wait for it in a collective."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed"])

_pools: dict[int, _Pool] = {}


class RankFailure(AssertionError):
    """What went wrong on the ranks: one entry a failed rank, in `errors`."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    expect_errors: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """Call `function(*args)` on every rank and give the results in rank order.

    Args:
        function: A module-level function.
        world_size: Number of processes.
        args: Picklable arguments, the same on all ranks; the function asks torch.distributed for its rank.
        timeout: Seconds until a rank that has not answered counts as hung.
        expect_errors: Put a rank's exception in its place of the list, rather than raise. Its traceback is in
            its `rank_traceback`. A hang or a death is raised all the same.
        fresh: Use processes that serve this call alone, for functions that change a process for good
            (a Lightning trainer, a DeepSpeed engine).

    Raises:
        RankFailure: With each failed rank's traceback, or each hung rank's stack.
    """
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} cannot reach another process. Give a module-level function."
        )
    pool = _Pool(world_size) if fresh else _pools.get(world_size) or _Pool(world_size)
    if not fresh:
        _pools[world_size] = pool
    healthy = False
    try:
        results, failed = pool.call(function, args, timeout)
        healthy = True
    finally:
        if fresh or not healthy:
            pool.close()
            if _pools.get(world_size) is pool:
                del _pools[world_size]
    if failed and not expect_errors:
        errors = {rank: results[rank] for rank in failed}
        text = "\n".join(f"--- rank {rank} of {world_size}\n{errors[rank].rank_traceback}" for rank in failed)
        raise RankFailure(f"{function.__qualname__} raised on rank {_listed(failed)}:\n{text}", errors)
    return results


class _Pool:
    """The processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.processes: list[ForkServerProcess] = []
        self.connections: list[Connection] = []
        self.meeting = 0
        port = _free_port()
        try:
            for rank in range(world_size):
                self._start(rank, port)
            self._collect(START_LIMIT, "start")
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, port: int) -> None:
        ours, theirs = Pipe()
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = _FORKS.Process(target=serve, args=(theirs, str(self.folder), environment), daemon=True)
        with _no_main_module():
            process.start()
        theirs.close()
        self.processes.append(process)
        self.connections.append(ours)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> tuple[list[Any], list[int]]:
        """Results of all ranks, exceptions among them, and the ranks that raised."""
        module = sys.modules[function.__module__]
        header = (module.__name__, _source(module), function.__qualname__, [*sys.path], timeout, self.meeting)
        message = pickle.dumps(args)
        for connection in self.connections:
            connection.send_bytes(pickle.dumps(header))
            connection.send_bytes(message)
        results, failed = self._collect(timeout, function.__qualname__)
        # After an error the ranks may have begun different collectives: let them meet in a new group.
        self.meeting += bool(failed)
        return results, failed

    def _collect(self, timeout: float, name: str) -> tuple[list[Any], list[int]]:
        results: dict[int, Any] = {}
        failed: list[int] = []
        dead: dict[int, Any] = {}
        begin = time.monotonic()
        deadline = begin + timeout
        pending = {connection: rank for rank, connection in enumerate(self.connections)}
        while pending:
            ready: list[Any] = wait([*pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._hung(
                    name, [*pending.values()], time.monotonic() - begin, {**_only(results, failed), **dead}
                )
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join()
                    code = self.processes[rank].exitcode
                    dead[rank] = RemoteError(f"rank {rank} died with exit code {code} in {name}.")
                    dead[rank].rank_traceback = f"{dead[rank]}\n{self._stack(rank)}"
                else:
                    results[rank] = value
                    if ok:
                        continue
                    failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE)
        if dead:
            text = "\n".join(str(error.rank_traceback) for error in dead.values())
            raise RankFailure(text, {**_only(results, failed), **dead})
        return [results[rank] for rank in range(self.world_size)], sorted(failed)

    def _hung(self, name: str, ranks: list[int], seconds: float, errors: dict[int, Any]) -> RankFailure:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)  # the handler writes the stacks
        lines = [
            f"{name} hung on rank {_listed(ranks)} of {self.world_size}: no answer after {seconds:.1f} s."
        ]
        lines += [
            f"--- rank {rank} hangs here (most recent call first)\n{self._stack(rank)}" for rank in ranks
        ]
        lines += [f"--- rank {rank} raised\n{error.rank_traceback}" for rank, error in errors.items()]
        return RankFailure("\n".join(lines), errors)

    def _stack(self, rank: int) -> str:
        path = self.folder / f"stack-{rank}"
        return path.read_text(errors="replace").strip() if path.exists() else "(no stack)"

    def close(self) -> None:
        """End the processes: kindly when they idle, at once when they do not follow."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from running the main module, here the whole of pytest, in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _source(module: ModuleType) -> str | None:
    """The file a rank loads a test module from: pytest's own import names mean nothing to another process."""
    return getattr(module, "__file__", None)


def _only(results: dict[int, Any], ranks: list[int]) -> dict[int, BaseException]:
    return {rank: results[rank] for rank in ranks}


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@atexit.register
def close_pools() -> None:
    """End all rank processes."""
    while _pools:
        _pools.popitem()[1].close()
