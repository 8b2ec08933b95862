"""Write the tables of parts: docs/parts.md, and the rows of README.md, from the code.

`python tools/parts_table.py` writes both; with `--check` it exits with 1 if one is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

import rlobjectives
from rlobjectives import Component, Estimator, LossReduction, PolicyLoss, TokenTerm
from rlobjectives.corrections import PolicyCorrection
from rlobjectives.terms import AdvantageShaping

PAGE = ROOT / "docs" / "parts.md"
README = ROOT / "README.md"
KINDS: Mapping[str, type[Component] | tuple[type[Component], ...]] = {
    "Policy losses": PolicyLoss,
    "Other terms": (TokenTerm, AdvantageShaping),
    "Corrections": PolicyCorrection,
    "Reductions": LossReduction,
}
"""Rows of the tables, and what is listed in each; the first that fits. Estimators have three."""
LEVELS = {"per sequence": False, "per token": True, "either": None}
BESIDE = {"Other terms": "entropy bonus"}
"""What an objective has of a kind without a part."""
HEAD = """# Parts

Every part of the package by what it is for, with its options. `tools/parts_table.py` writes this page from the code; the docstrings
have the formula, the source and an example of each.
"""


def parts() -> Iterator[type[Component]]:
    """The parts that one can use as they are."""
    for name in sorted(rlobjectives.__all__, key=str.casefold):
        found = getattr(rlobjectives, name)
        if not (isinstance(found, type) and issubclass(found, Component)) or inspect.isabstract(found):
            continue
        if dataclasses.is_dataclass(found):
            yield found


def kind_of(part: type[Any]) -> str:
    """The row that a part stands in."""
    if issubclass(part, Estimator):
        fixed = isinstance(part.token_level, bool) and "token_level" not in options(part)
        return f"Estimators, {next(name for name, level in LEVELS.items() if level is (part.token_level if fixed else None))}"
    return next(name for name, base in KINDS.items() if issubclass(part, base))


def listed() -> dict[str, list[type[Any]]]:
    """Parts by row, in the order of the rows."""
    found: dict[str, list[type[Any]]] = {f"Estimators, {level}": [] for level in LEVELS}
    found |= {name: [] for name in KINDS}
    for part in parts():
        found[kind_of(part)].append(part)
    return found


def options(part: Any) -> dict[str, str]:
    """Options of a part with their defaults, as a reader would write them."""
    found = {}
    for one in dataclasses.fields(part):
        if one.init:
            factory: Any = one.default_factory
            default = one.default if factory is dataclasses.MISSING else factory()
            found[one.name] = "" if default is dataclasses.MISSING else f"={default!r}"
    return found


def summary(part: type[Any]) -> str:
    """The first sentence of its docstring."""
    text = " ".join(re.split(r"\n\s*\n", inspect.getdoc(part) or "")[0].split())
    return re.split(r"(?<=[^.]\w[.])\s", text)[0].rstrip(".:").replace("|", "\\|")


def page() -> str:
    """docs/parts.md."""
    text = HEAD
    for kind, found in listed().items():
        text += f"\n## {kind}\n\n| part | what it does | options |\n|---|---|---|\n"
        for part in found:
            shown = ", ".join(f"`{name}{default}`" for name, default in options(part).items())
            text += f"| `{part.__name__}` | {summary(part)} | {shown.replace('|', chr(92) + '|')} |\n"
        if kind in BESIDE:
            text += f"\nBeside these: {BESIDE[kind]} (`entropy_coef` of the objective).\n"
    return text


def readme() -> str:
    """README.md with its rows of parts as they should be.

    Raises:
        ValueError: If a row is missing.
    """
    text = README.read_text(encoding="utf-8")
    for kind, found in listed().items():
        names = [f"`{part.__name__}`" for part in found] + ([BESIDE[kind]] if kind in BESIDE else [])
        start = f"| {kind} |"
        rows = [line for line in text.splitlines() if line.startswith(start)]
        if len(rows) != 1:
            raise ValueError(f"README.md should have one row {kind!r}; it has {len(rows)}.")
        text = text.replace(rows[0], f"{start} {', '.join(names)} |")
    return text


def main() -> int:
    """Write both, or check them."""
    written = {PAGE: page(), README: readme()}
    if "--check" in sys.argv[1:]:
        return int(
            any(
                not file.exists() or file.read_text(encoding="utf-8") != text
                for file, text in written.items()
            )
        )
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
