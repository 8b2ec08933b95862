"""A selection of the fault table is played in every test run; docs/faults.md has the whole of it."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.faults import page
from tests.faults.catalogue import CELLS, FAULTS, HOSTS
from tests.faults.cells import Stage

NEEDED = ("lightning", "deepspeed", "trl")
pytestmark = [
    pytest.mark.timeout(390),  # a run that hangs is ended by its own, shorter limit
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]
LIMIT = 120.0
"""Seconds after which a run counts as hanging; the longest takes three on quiet cores."""

# Each fault at least once, and each host; mostly on hosts whose runs are short.
PLAYED = {
    "own": (
        "raise-forward", "nan-reward", "short-logprobs", "other-cut", "fewer-losses", "kill-backward-0",
        "kill-save-1", "term-sampling-1", "disk-full",
    ),
    "lightning": ("nan-logprobs", "term-save-0", "read-only", "half", "foreign"),
    "ddp": ("raise-loss", "other-epochs", "slow", "term-step-0", "term-forward-1", "kill-step-0", "folder-removed"),
    "zero3": ("kill-forward-1", "damaged"),
    "fsdp2": ("raise-sampling", "nan-advantage", "term-backward-0"),
    "trl": ("short-rewards", "damaged", "missing", "kill-save-0"),
    "trl-ddp": ("raise-reward", "other-objective", "other-rate", "kill-sampling-1"),
}  # fmt: skip
NAMES = [f"{host}.{fault}" for host, faults in PLAYED.items() for fault in faults]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with Stage(tmp_path_factory.mktemp("faults"), LIMIT) as made:
        yield made


@pytest.fixture(scope="module")
def documented():
    return page.parsed(page.PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_stops_or_is_right(stage, documented, name):
    (cell,) = (cell for cell in CELLS if cell.name == name)
    outcome = stage.play(cell)
    told = "\n".join([f"{name}: {outcome.verdict}", *outcome.ranks, outcome.left])
    if outcome.verdict != documented[name][0]:  # why: what every rank printed, and its stacks where it hangs
        logs = sorted(stage.folder.glob(f"{name}/*/rank-*.log"))
        told += "".join(f"\n{log}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs)
    assert outcome.verdict in page.GOOD, told
    assert outcome.verdict == documented[name][0], told
    if cell.fault.action == "raise":
        assert all("ZeroDivisionError: nothing works" in words for words in outcome.ranks), told
    before_any_save = cell.fault.name.startswith(("other", "read-only", "fewer"))
    assert "resumes to the same end" in outcome.left or before_any_save, told


def test_the_selection_has_every_kind_of_fault_on_some_host():
    def kind(fault: str) -> str:
        return fault.removesuffix("-0").removesuffix("-1")

    assert {kind(name.split(".")[1]) for name in NAMES} == {kind(fault.name) for fault in FAULTS}
    assert set(PLAYED) == {host.name for host in HOSTS}
    assert set(NAMES) <= {cell.name for cell in CELLS}


def test_the_page_has_every_cell_and_none_is_bad(documented):
    assert documented.keys() == {cell.name for cell in CELLS}
    assert {verdict for verdict, _ in documented.values()} <= set(page.GOOD)
    assert all(seconds is not None for verdict, seconds in documented.values() if verdict == "stops")


def test_the_page_is_what_the_tool_writes():
    text = page.PATH.read_text(encoding="utf-8")
    head = (page.PATH.parents[1] / "tests" / "faults" / "page.md").read_text(encoding="utf-8")
    assert text.startswith(head.rstrip()), "docs/faults.md: run tools/fault_table.py --write"
    for host in HOSTS:
        section = text.split(f"\n## {host.title[0].upper()}{host.title[1:]}\n", 1)[1].split("\n## ")[0]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[3:] if line]
        assert rows == [cell.fault.title for cell in CELLS if cell.host is host]
        for line in section.splitlines():
            if line.startswith("| exception "):  # every rank says why it stops
                assert line.count("ZeroDivisionError: nothing works") == host.ranks, line
            assert not re.search(r"\bhangs\b", line), line  # "hanging" is a word of gloo's messages
            assert "silently wrong" not in line, line
