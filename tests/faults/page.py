"""docs/faults.md: the outcomes of all cells as a page, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.faults.catalogue import CELLS, FAULTS, HOSTS, NOT_HERE, Cell
from tests.faults.cells import Outcome

__all__ = ["GOOD", "PATH", "parsed", "written"]

PATH = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
GOOD = ("stops", "right")
"""Verdicts that a cell may have."""
_LONGEST = 220
_NONE = "–"
_TEXT = Path(__file__).with_name("page.md")
_GLOO = re.compile(r"\[/[^\]]*third_party/(gloo/[^\]]*?)\]\s*")
_ADDRESS = re.compile(r"\[?(127\.0\.0\.1|::1)\]?:\d+")
_CHATTER = (
    " This is typically caused by a remote worker crashing.",
    " Check the logs of the remote worker before",
)


def written(outcomes: Mapping[str, Outcome], folder: Path, machine: str) -> str:
    """The page.

    Args:
        outcomes: Of all cells.
        folder: In which they were played; its name is left out of messages.
        machine: On what, in words.
    """
    lines = [
        _TEXT.read_text(encoding="utf-8").rstrip(),
        "",
        f"Played on {machine}.",
        "",
        "## At a glance",
        "",
    ]
    lines += _row("fault", *(host.title for host in HOSTS))
    lines += [f"|---{'|---' * len(HOSTS)}|"]
    for fault in FAULTS:
        lines += _row(fault.title, *(_glance(outcomes.get(Cell(host, fault).name)) for host in HOSTS))
    lines += ["", *_reasons()]
    for host in HOSTS:
        ranks = [f"rank {rank}" for rank in range(host.ranks)]
        lines += ["", f"## {host.title[0].upper()}{host.title[1:]}", ""]
        lines += _row("fault", *ranks, "seconds", "left on the disk")
        lines += [f"|---{'|---' * host.ranks}|---:|---|"]
        for cell in CELLS:
            if cell.host is host and cell.name in outcomes:
                lines += _details(cell, outcomes[cell.name], folder)
    return "\n".join(lines) + "\n"


def _details(cell: Cell, outcome: Outcome, folder: Path) -> list[str]:
    ranks = [_short(words, folder) for words in outcome.ranks]
    return _row(
        cell.fault.title, *ranks, f"{outcome.seconds:.1f}", _short(outcome.left, folder, 2 * _LONGEST)
    )


def _glance(outcome: Outcome | None) -> str:
    if outcome is None:
        return _NONE
    return f"{outcome.verdict}, {outcome.seconds:.1f} s" if outcome.verdict == "stops" else outcome.verdict


def _reasons() -> list[str]:
    told: dict[str, list[str]] = {}
    titles = {host.name: host.title for host in HOSTS}
    for (host, fault), why in NOT_HERE.items():
        title = next(one.title for one in FAULTS if one.name == fault)
        told.setdefault(f"{title}: {why}", []).append(titles[host])
    return [f"{_NONE} has no meaning there: one process has no other rank; " + "; ".join(told) + "."]


def _row(*cells: str) -> list[str]:
    return ["| " + " | ".join(cells) + " |"]


def _short(words: str, folder: Path, longest: int = _LONGEST) -> str:
    """A message without what differs from run to run, on one line of a table."""
    text = words.replace(str(folder), "…")
    text = _ADDRESS.sub("another rank", _GLOO.sub("", text))
    for piece in _CHATTER:
        text = text.split(piece)[0] if piece in text and longest == _LONGEST else text
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def parsed(page: str) -> dict[str, tuple[str, float | None]]:
    """Verdict and seconds of each cell, by its key, from the page's table at a glance.

    Raises:
        ValueError: If the table's hosts or faults are not those of the catalogue.
    """
    part = page.split("## At a glance", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in part.splitlines()
        if line.startswith("| ")
    ]
    head, *body = rows
    if head[1:] != [host.title for host in HOSTS] or [row[0] for row in body] != [f.title for f in FAULTS]:
        raise ValueError(
            "docs/faults.md has other hosts or faults than the catalogue: run tools/fault_table.py"
        )
    found: dict[str, tuple[str, float | None]] = {}
    for fault, row in zip(FAULTS, body, strict=True):
        for host, text in zip(HOSTS, row[1:], strict=True):
            if text != _NONE:
                verdict, _, seconds = text.partition(", ")
                number = float(seconds.removesuffix(" s")) if seconds else None
                found[Cell(host, fault).name] = (verdict, number)
    return found
