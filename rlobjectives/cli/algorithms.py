"""``rlobjectives algorithms``: every named objective in one table."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rlobjectives.capabilities import Capabilities
from rlobjectives.registry import ALGORITHMS, AlgorithmSpec, resolve
from rlobjectives.slots import missing_options

__all__ = ["rows", "run", "table"]

_HEADINGS = ("name", "what it is", "parts", "needs", "source")


def run(arguments: Sequence[str]) -> int:
    """Print the table, as wide as the terminal."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print("usage: rlobjectives algorithms\n\nList the named objectives: `Objective.named(NAME)`.")
        return 0
    if arguments:
        print(
            f"rlobjectives: error: algorithms takes no arguments; got {' '.join(arguments)}", file=sys.stderr
        )
        return 2
    print(table(shutil.get_terminal_size((120, 24)).columns))
    return 0


def rows() -> list[tuple[str, ...]]:
    """Name, summary, parts, needs and source of each algorithm.

    Example:
        >>> [row[0] for row in rows() if row[0].startswith("gd")]
        ['gdpo']
    """
    return [
        (name, spec.summary, _parts(spec), ", ".join(_capabilities(spec).needs()) or "–", spec.source)
        for name, spec in sorted(ALGORITHMS.items())
    ]


def table(width: int = 120) -> str:
    """The rows as text, cells wrapped to fit."""
    body = rows()
    natural = [max(len(row[column]) for row in [_HEADINGS, *body]) for column in range(len(_HEADINGS))]
    # The name and the source stay whole; the other columns share what is left, two spaces between columns.
    free = max(60, width - natural[0] - natural[-1] - 2 * (len(_HEADINGS) - 1))
    wanted = sum(natural[1:-1])
    widths = [natural[0], *(min(one, max(18, free * one // wanted)) for one in natural[1:-1]), natural[-1]]
    lines: list[str] = []
    for row in [_HEADINGS, tuple("─" * one for one in widths), *body]:
        cells = [textwrap.wrap(cell, one) or [""] for cell, one in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            texts = [cell[line] if line < len(cell) else "" for cell in cells]
            lines.append("  ".join(text.ljust(one) for text, one in zip(texts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _parts(spec: AlgorithmSpec) -> str:
    texts = []
    for role, name in spec.parts.items():
        options = ", ".join(f"{key}={value}" for key, value in spec.options.get(role, {}).items())
        texts.append(f"{name}({options})" if options else name)
    return " + ".join(texts)


def _capabilities(spec: AlgorithmSpec) -> Capabilities:
    """What the parts need, from instances where options can make them, else from their classes."""
    merged = Capabilities()
    for role, name in spec.parts.items():
        kind, options = resolve(name), spec.options.get(role, {})
        missing = missing_options(kind, options)
        merged = merged.merge(kind.capabilities if missing else kind(**options).required())
    return merged
