"""One rank process of `ranks.run_ranks`: meet the other ranks, then run what the test process sends."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist

SEED = 20_240_229


class RemoteError(Exception):
    """Stands for an exception that cannot be pickled, and for a rank that died."""


def meet(folder: Path, rank: int, world_size: int, meeting: int) -> None:
    """Join the process group of this meeting; a file needs no free port and survives a killed run."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'meeting-{meeting}'}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=10),  # the test process has the shorter limit and tells more
    )


def load(name: str, source: str | None) -> object:
    """The module under the name the test process knows it by, so that its classes unpickle on both sides."""
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if source is None or getattr(module, "__file__", None) == source:
            return module
    if source is None:
        raise ImportError(f"{name} has no file. Put the function into a test module.")
    specification = importlib.util.spec_from_file_location(name, source)
    if specification is None or specification.loader is None:
        raise ImportError(f"{source} cannot be loaded as {name}. Put the function into a test module.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def packed(error: BaseException) -> bytes:
    """The exception with its traceback as text; a stand-in when it does not survive pickling."""
    text = traceback.format_exc()
    try:
        error.rank_traceback = text  # type: ignore[attr-defined]
        error.__cause__ = error.__context__ = None
        error.__traceback__ = None
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except Exception:  # noqa: BLE001  # any failure means the same: it does not travel
        stand_in = RemoteError(f"{type(error).__name__}: {error}")
        stand_in.rank_traceback = text  # type: ignore[attr-defined]
        message = pickle.dumps((False, stand_in))
    return message


def serve(connection: Connection, at: str, environment: dict[str, str]) -> None:
    """Be one rank: serve calls until the test process closes the connection."""
    os.environ.update(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    folder = Path(at)
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    torch.set_num_threads(1)
    meet(folder, rank, world_size, 0)
    connection.send_bytes(pickle.dumps((True, None)))
    current = 0
    while True:
        try:
            name, source, function, path, timeout, meeting = pickle.loads(connection.recv_bytes())
            message = connection.recv_bytes()
        except EOFError:
            break
        # Should the test process be gone when this call hangs, nobody else would end this process.
        faulthandler.dump_traceback_later(timeout + 30, exit=True, file=stack)
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        try:
            if meeting != current:
                meet(folder, rank, world_size, meeting)
                current = meeting
            module = load(name, source)
            torch.manual_seed(SEED)
            answer = pickle.dumps((True, attrgetter(function)(module)(*pickle.loads(message))))
        except BaseException as error:  # noqa: BLE001  # the test process decides what an error means
            answer = packed(error)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(answer)
