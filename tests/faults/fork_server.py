"""A process that has imported everything once; every rank of every run is a fork of it.

Importing torch, Lightning, DeepSpeed, transformers and TRL takes a process many seconds, a fork takes milliseconds. The
server does nothing else: no thread, no backward, no process group. A fork runs its program and ends as any Python
program does, exit handlers and waiting threads included, because that is where runs hang, too.

    python -m tests.faults.fork_server      # one JSON object a line: commands in, what happened out
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "lightning.pytorch", "deepspeed", "datasets",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2", "peft", "accelerate", "trl",
    # What DeepSpeed imports when its engine starts.
    "networkx", "functorch.compile", "torch._inductor.compile_fx", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon",
    "rlobjectives.integrations.lightning", "rlobjectives.integrations.trl",
    "tests.faults.own_loop", "tests.faults.lightning_run", "tests.faults.trl_run",
)  # fmt: skip
_NEW_MOUNTS, _PRIVATE = 0x00020000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE


def private_mounts() -> bool:
    """Whether this process may mount small disks that only it and its forks see; it needs the right to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_NEW_MOUNTS) != 0:
        return False
    return bool(libc.mount(b"none", b"/", None, _PRIVATE, None) == 0)


def mount_disk(path: str, size: str) -> bool:
    """Put an empty disk of a size over a folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, f"size={size}".encode()) == 0)


def unmount_disk(path: str) -> None:
    """Take it away again, at once."""
    ctypes.CDLL(None).umount2(path.encode(), 2)


class Server:
    """Reads commands, forks, and tells who has ended.

    Args:
        answers: File descriptor to write to.
    """

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.alive: set[int] = set()
        self.pending = b""
        self.mounts = private_mounts()

    def tell(self, **what: Any) -> None:
        """Write one line."""
        os.write(self.answers, json.dumps(what).encode() + b"\n")

    def serve(self) -> dict[str, Any] | None:
        """Serve until the commands end. Returns a job in the fork that is to run it, None in the server itself."""
        self.tell(ready=True, mounts=self.mounts)
        while True:
            ready, _, _ = select.select([0], [], [], 0.01 if self.alive else 5.0)
            self._reap()
            if not ready:
                continue
            found = os.read(0, 1 << 16)
            if not found:
                return None
            *lines, self.pending = (self.pending + found).split(b"\n")
            for line in lines:
                job = self._obey(json.loads(line))
                if job is not None:
                    return job

    def _obey(self, command: dict[str, Any]) -> dict[str, Any] | None:
        if "mount" in command:
            self.tell(mounted=self.mounts and mount_disk(command["mount"], command["size"]))
            return None
        if "unmount" in command:
            unmount_disk(command["unmount"])
            self.tell(unmounted=True)
            return None
        pids = []
        for rank in range(command["ranks"]):
            pid = os.fork()
            if not pid:
                return {**command, "rank": rank}
            pids.append(pid)
        self.alive.update(pids)
        self.tell(started=pids)
        return None

    def _reap(self) -> None:
        for pid in [*self.alive]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.alive.discard(pid)
                self.tell(ended=pid, code=os.waitstatus_to_exitcode(status), at=time.monotonic())


def become_rank(job: dict[str, Any], answers: int) -> None:
    """Leave the server: a session, log files and an environment of this rank's own."""
    os.setsid()
    os.close(answers)
    log = os.open(f"{job['logs']}/rank-{job['rank']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    if job["ranks"] > 1:
        os.environ.update(
            RANK=str(job["rank"]), LOCAL_RANK=str(job["rank"]), WORLD_SIZE=str(job["ranks"]),
            LOCAL_WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]),
        )  # fmt: skip
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Whoever waits for this process may be gone: nothing outlives its limit for long.
    faulthandler.dump_traceback_later(job["limit"] + 60.0, exit=True)


def main() -> None:
    """Import, serve, and in a fork run the program to its end."""
    answers = os.dup(1)
    os.dup2(2, 1)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # a host that is not installed has no cells
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from rlobjectives.causal_lm.strategy import load_shared_memory_op

        load_shared_memory_op()  # which takes every ZeRO run seconds
    gc.freeze()  # forks share what nobody collects
    job = Server(answers).serve()
    if job is None:
        return
    become_rank(job, answers)
    from tests.faults import rank_run

    rank_run.run(importlib.import_module(f"tests.faults.{job['program']}").run, job)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
