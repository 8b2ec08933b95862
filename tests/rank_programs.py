"""Start a Python program once per rank, the way torchrun does, with a limit after which a hang is a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_program(module: str, *arguments: str, ranks: int = 2, timeout: float = 240.0) -> str:
    """Run ``python -m module arguments`` on every rank and wait for all of them.

    Args:
        module: Dotted name, from the repository's root.
        *arguments: Given to each rank alike.
        ranks: Processes; they meet through gloo on the loopback address.
        timeout: Seconds for all ranks together.

    Returns:
        What the ranks printed, one rank after the other.

    Raises:
        AssertionError: If a rank fails or the time is over; the message has the end of each rank's output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        processes = [_start(module, arguments, rank, ranks, port, logs[rank]) for rank in range(ranks)]
        codes: list[int | str] = []
        try:
            for process in processes:
                try:
                    codes.append(process.wait(timeout if not codes or codes[0] == 0 else 10.0))
                except subprocess.TimeoutExpired:
                    codes.append(f"still running after {timeout:.0f} s")
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        outputs = [log.read_text(errors="replace") for log in logs]
    if any(code != 0 for code in codes):
        ends = "\n".join(f"--- rank {rank}: {codes[rank]}\n{outputs[rank][-6000:]}" for rank in range(ranks))
        raise AssertionError(f"{module} {' '.join(arguments)} failed\n{ends}")
    return "\n".join(outputs)


def _start(
    module: str, arguments: tuple[str, ...], rank: int, ranks: int, port: int, log: Path
) -> subprocess.Popen[bytes]:
    environment = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",  # by this Lightning knows that the ranks are already there
    }
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
