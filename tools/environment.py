"""The environment variables of every test and demo run, and the command that runs a program under them.

`make test` and `make demo` call `python tools/environment.py PROGRAM ARGUMENTS…`; `tests/conftest.py` calls
`apply()` so that a bare `pytest` sees the same values. A variable that is already set wins.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTENSIONS = ROOT / ".cache" / "torch_extensions"


def variables() -> dict[str, str]:
    """Give the variables and their values for this machine."""
    values = {
        # Rank processes share few cores; one OpenMP thread each keeps them from fighting and sums repeatable.
        "OMP_NUM_THREADS": "1",
        # Compiled ops of this checkout only: a home-wide cache can hold builds of another torch.
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        # Nothing here needs a download at run time; without this a missing file becomes a long network wait.
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        # Forked tokenizer threads dead-lock in data-loader workers.
        "TOKENIZERS_PARALLELISM": "false",
        # Ranks meet on the loopback address; gloo otherwise resolves the host name, which may have no address.
        "GLOO_SOCKET_IFNAME": "lo",
        "MPLBACKEND": "Agg",
        "PYTHONFAULTHANDLER": "1",
    }
    if not Path("/dev/nvidiactl").exists():
        # DeepSpeed guesses its device by importing GPU libraries; on a CPU it has to be told.
        values["DS_ACCELERATOR"] = "cpu"
    if sys.platform == "darwin":
        values["GLOO_SOCKET_IFNAME"] = "lo0"
    return values


def apply() -> None:
    """Put the variables into this process's environment, without overriding what is set."""
    for name, value in variables().items():
        os.environ.setdefault(name, value)
    # Without byte code every rank process compiles Lightning and transformers again, for seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Building or loading a compiled op needs the ninja of this environment on the path.
    binaries = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "").split(os.pathsep)
    if binaries not in path:
        os.environ["PATH"] = os.pathsep.join([binaries, *path])
    remove_stale_locks()


def remove_stale_locks() -> None:
    """Delete op-build locks that no living process holds.

    torch waits for ever on a `lock` file, and a process that was killed while it built or loaded an op leaves
    one. Its owner keeps the file open, so a lock that nobody has open belongs to nobody.
    """
    locks = [*EXTENSIONS.glob("**/lock")]
    if not locks:
        return
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            held.add(link.readlink())
    for lock in locks:
        if lock not in held:
            lock.unlink(missing_ok=True)


def main(command: list[str]) -> None:
    """Replace this process by `command`, run under the variables."""
    if not command:
        raise SystemExit("usage: python tools/environment.py PROGRAM [ARGUMENT…]; give the program to run.")
    apply()
    try:
        os.execvp(command[0], command)  # noqa: S606  # a shell would have to quote the arguments again
    except FileNotFoundError:
        raise SystemExit(
            f"{command[0]}: not found. Run `make setup` first, or give the program's path."
        ) from None


if __name__ == "__main__":
    main(sys.argv[1:])
