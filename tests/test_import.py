"""`import rlobjectives` needs torch alone, and costs little on top of it."""

from __future__ import annotations

import json
import subprocess
import sys

BUDGET = 80_000
"""Function calls that the package may add to `import torch`: half again as many as it takes, and the same on any machine."""

ADDED = """
import json, sys
import torch
before = {*sys.modules}
import rlobjectives
print(json.dumps(sorted({name.split(".")[0] for name in {*sys.modules} - before})))
"""
COST = """
import cProfile, pstats
import torch
profile = cProfile.Profile()
profile.enable()
import rlobjectives
profile.disable()
print(pstats.Stats(profile).total_calls)
"""


def run(program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_import_brings_nothing_but_torch():
    added = {*json.loads(run(ADDED))} - sys.stdlib_module_names - {"torch"}
    assert added == {"rlobjectives"}, (
        f"import rlobjectives also imports {sorted(added - {'rlobjectives'})}. Import it where it is used, "
        "under rlobjectives.integrations or rlobjectives.cli."
    )


def test_import_is_light():
    calls = int(run(COST))
    assert calls < BUDGET, f"import rlobjectives makes {calls:,} calls beyond torch; {BUDGET:,} is the limit."
