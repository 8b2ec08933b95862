"""`import rlobjectives` needs torch alone, and costs little on top of it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

BUDGET = 0.3
"""Seconds of processor time that the package may add to `import torch`."""

ADDED = """
import json, sys
import torch
before = {*sys.modules}
import rlobjectives
print(json.dumps(sorted({name.split(".")[0] for name in {*sys.modules} - before})))
"""
COST = """
import os, time
import torch
for _ in range(5):
    if os.fork() == 0:  # torch is loaded once; each child imports the package for the first time
        begin = time.process_time()
        import rlobjectives
        print(time.process_time() - begin, flush=True)
        os._exit(0)
    os.wait()
"""


def run(program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", program]
    # With byte code, as an installed package has it: the first child writes what is missing.
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_import_brings_nothing_but_torch():
    added = {*json.loads(run(ADDED))} - sys.stdlib_module_names - {"torch"}
    assert added == {"rlobjectives"}, (
        f"import rlobjectives also imports {sorted(added - {'rlobjectives'})}. Import it where it is used, "
        "under rlobjectives.integrations or rlobjectives.cli."
    )


def test_import_is_quick():
    # Processor time, which other work on the machine does not stretch; the median, which one cold cache does not move.
    cost = statistics.median(map(float, run(COST).split()))
    assert cost < BUDGET, f"import rlobjectives takes {cost:.2f} s beyond torch; {BUDGET} s is the limit."
