"""Write docs/faults.md: what every host does under every fault.

`python tools/fault_table.py` plays every cell that has no result yet and writes the page when none is missing;
`python tools/fault_table.py 'ddp.*' '*.kill-*'` plays those anew; with `--write` nothing is played. Results are kept one
file a cell in `runs/faults`, with the logs of all ranks beside them. Two cores take about half an hour for all cells.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import environment  # noqa: E402

environment.apply()  # before torch, whose thread pools read it once

import torch  # noqa: E402

from tests.faults import page  # noqa: E402
from tests.faults.catalogue import CELLS  # noqa: E402
from tests.faults.cells import Outcome, Stage  # noqa: E402

RESULTS = ROOT / "runs" / "faults"


def known(folder: Path) -> dict[str, Outcome]:
    """Outcomes of the cells that have been played."""
    found = {}
    for cell in CELLS:
        path = folder / f"{cell.name}.json"
        if path.exists():
            found[cell.name] = Outcome(**json.loads(path.read_text(encoding="utf-8")))
    return found


def play(names: list[str], folder: Path, limit: float) -> None:
    """Play cells one at a time and keep what happened."""
    chosen = [cell for cell in CELLS if cell.name in names]
    began = time.monotonic()
    with Stage(folder, limit) as stage:
        for number, cell in enumerate(chosen, 1):
            path = folder / f"{cell.name}.json"
            path.unlink(missing_ok=True)
            outcome = stage.play(cell)
            path.write_text(json.dumps(outcome.plain(), indent=1, ensure_ascii=False), encoding="utf-8")
            left = (time.monotonic() - began) / number * (len(chosen) - number) / 60.0
            mark = "   " if outcome.verdict in page.GOOD else "!! "
            print(
                f"{mark}{number}/{len(chosen)}, {left:.0f} min left  {cell.name}: {outcome.verdict}, "
                f"{outcome.seconds:.1f} s",
                flush=True,
            )
            if outcome.verdict not in page.GOOD:
                print(
                    "\n".join(f"      {words[:300]}" for words in (*outcome.ranks, outcome.left)), flush=True
                )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cells", nargs="*", help="names or patterns (HOST.FAULT); default: those without a result"
    )
    parser.add_argument("--write", action="store_true", help="only write the page from the results there are")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a run hangs")
    given = parser.parse_args(arguments)
    if not given.write:
        found = known(given.results)
        names = [
            cell.name
            for cell in CELLS
            if (
                any(fnmatch.fnmatch(cell.name, one) for one in given.cells)
                if given.cells
                else cell.name not in found
            )
        ]
        if not names and given.cells:
            parser.error(f"no cell is named {' or '.join(given.cells)}; for example: {CELLS[0].name}")
        if names:
            play(names, given.results, given.limit)
    found = known(given.results)
    missing = [cell.name for cell in CELLS if cell.name not in found]
    bad = {name: one.verdict for name, one in found.items() if one.verdict not in page.GOOD}
    for name, verdict in bad.items():
        print(f"{name}: {verdict}")
    if missing:
        print(
            f"{len(missing)} cells have no result yet ({', '.join(missing[:3])} …); the page is written when none is missing."
        )
        return 1
    machine = f"{os.cpu_count()} cores with torch {torch.__version__.split('+')[0]}, gloo and Python {platform.python_version()}"
    page.PATH.write_text(page.written(found, given.results.resolve(), machine), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
