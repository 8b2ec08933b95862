"""Measure how often things are said, and print it beside what is aimed at: python tools/house_figures.py [--json].

Needs nothing but Python: it reads the sources and imports none of them.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlobjectives"
COLUMN = "teacher_logprobs"
"""The column whose mentions are counted."""
EXAMPLE = "LengthPower"
"""The part whose files are listed: one that no paper's algorithm, option of TRL or comparison with peers names as well."""
LAWS = ("laws", "parts", "windows", "strategies")
"""Modules of the tests that run every law on every part."""
GENERATED = ("docs/metrics.md", "docs/parts.md", "tests/data/", "rlobjectives/testing/")
"""Files that tools write, or that hold for every part."""
ROWS = re.compile(
    r"^\| (Estimators, [^|]*|Policy losses|Other terms|Corrections|Reductions) \|.*$", re.MULTILINE
)
"""Rows of README.md that `tools/parts_table.py` writes."""
MECHANISMS: Mapping[str, str] = {
    "columns that parts read and trainers offer": r"^    reads: ClassVar|def (reads|offers)\(",
    "contradictions with other parts and the trainer (conflicts)": r"def conflicts\(",
    "flags of needs (Capabilities.needs_…)": r"^    needs_(?!prepass)\w+: bool",
    "facts of what is there (TrainerFacts.has_…)": r"^    has_(critic|reference|teacher): bool \| None",
    "sentences about the trainer (violations)": r"def violations\(self",
    "columns that may be unknown (tolerates)": r"def tolerates\(",
    "dry runs that catch what is missing": r"def (missing_columns|reads_column)\(",
    "asking a reduction for what it lacks": r"def reads_prompts\(",
}
"""What decides whether objective, data and trainer fit, and what shows that it is there."""
BEFORE = "rlobjectives/integrations/probe.py"
"""Names of the version before, which ask the mechanisms of this one."""


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        what: What is measured.
        now: Its number.
        goal: What is aimed at.
        details: What it is made of.
    """

    what: str
    now: float
    goal: str
    details: Sequence[str] = field(default_factory=tuple)


def sources() -> dict[str, str]:
    """Text of every module of the package, by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def code_lines(text: str) -> int:
    """Lines that hold more than a comment or a docstring."""
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(first := node.body[0], ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
        for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)
    }
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


# Imports --------------------------------------------------------------------------------------------


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Which modules of the package each one names, also for type checkers alone and inside functions."""
    known = {_module(path) for path in modules}
    found: dict[str, set[str]] = {}
    for path, text in modules.items():
        mine = _module(path)
        named: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    named.add(full if full in known else node.module)
        found[mine] = (named & known) - {mine}
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            place = stack.index(module)
            if len(members := stack[place:]) > 1:
                found.append(sorted(members))
            del stack[place:]

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return found


# Parts ----------------------------------------------------------------------------------------------


def parts(modules: Mapping[str, str]) -> list[str]:
    """Names of the package's parts: frozen dataclasses of the folders that hold them."""
    folders = ("estimators", "losses", "reductions", "terms", "corrections")
    found = []
    for path, text in modules.items():
        if any(path.startswith(f"rlobjectives/{folder}/") for folder in folders):
            for node in ast.parse(text).body:
                frozen = isinstance(node, ast.ClassDef) and any(
                    "dataclass" in ast.unparse(one) for one in node.decorator_list
                )
                if isinstance(node, ast.ClassDef) and frozen and node.bases and not node.name.startswith("_"):
                    found.append(node.name)
    return sorted(found)


def touched(part: str) -> dict[str, list[str]]:
    """Files in which the name of a part stands, by kind."""
    kinds = {
        "package": "rlobjectives/**/*.py",
        "tests": "tests/**/*.py",
        "pages": "**/*.md",
        "examples": "examples/*",
    }
    found: dict[str, list[str]] = {}
    for kind, pattern in kinds.items():
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            hidden = name.startswith((".", "build", "dist")) or any(
                one.startswith(".") for one in path.relative_to(ROOT).parts
            )
            if hidden or not path.is_file() or name.startswith(GENERATED):
                continue
            if re.search(rf"\b{part}\b", ROWS.sub("", path.read_text(encoding="utf-8"))):
                found.setdefault(kind, []).append(name)
    return found


def exceptions_by_name(names: Iterable[str]) -> list[str]:
    """Places of the laws that name a part."""
    pattern = re.compile(rf"^({'|'.join(map(re.escape, names))})\b")
    found = []
    for law in LAWS:
        for path in (ROOT / "tests" / f"{law}.py", PACKAGE / "testing" / f"{law}.py"):
            if path.exists():
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                        continue
                    if pattern.match(node.value) and "\n" not in node.value:
                        found.append(f"{path.name}:{node.lineno} {node.value!r}")
    return found


KINDS = ("Estimator", "PolicyLoss", "LossReduction", "PolicyCorrection", "TokenTerm", "TokenMetric")


def user_part() -> list[str]:
    """Lines of the shortest example of an estimator and a loss of one's own, by page."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
            kinds = [kind for kind in KINDS if f"({kind})" in block]
            if kinds:
                found.append(f"{page.relative_to(ROOT)}: {len(lines)} lines ({', '.join(kinds)})")
    return found


def post_inits(modules: Mapping[str, str]) -> list[tuple[str, int]]:
    """Each ``__post_init__`` and its lines."""
    return [
        (f"{path}:{node.lineno}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for path, text in modules.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
    ]


# The table ------------------------------------------------------------------------------------------


def figures() -> Iterator[Figure]:
    """Every figure."""
    modules = sources()
    columns = [path for path, text in modules.items() if COLUMN in text]
    yield Figure(f"files of the package in which {COLUMN} stands", len(columns), "≤ 6", columns)
    judged = [
        name
        for name, pattern in MECHANISMS.items()
        if any(re.search(pattern, text, re.MULTILINE) for path, text in modules.items() if path != BEFORE)
    ]
    yield Figure("mechanisms that judge fit", len(judged), "2", judged)
    files = touched(EXAMPLE)
    listed = [f"{kind}: {', '.join(names)}" for kind, names in files.items()]
    yield Figure(
        f"files that a part touches ({EXAMPLE}, generated ones aside)",
        sum(map(len, files.values())),
        "≤ 4",
        listed,
    )
    lines = {path: code_lines(text) for path, text in modules.items()}
    rooms: dict[str, int] = {}
    for path, count in lines.items():
        names = path.split("/")[1:]
        room = "/".join(names[:2]) if names[0] == "integrations" and len(names) > 2 else names[0]
        rooms[room] = rooms.get(room, 0) + count
    by_room = [f"{room}: {count}" for room, count in sorted(rooms.items(), key=lambda one: -one[1])]
    yield Figure("code lines of the package", sum(lines.values()), "≤ 12,800", by_room)
    everything = sum(text.count("\n") for text in modules.values())
    yield Figure("all lines of the package", everything, "–")
    crowd = [
        path for path in modules if path.startswith(("rlobjectives/losses/", "rlobjectives/estimators/"))
    ]
    yield Figure("files in losses/ and estimators/", len(crowd), "≤ 37", crowd)
    found = circles(imports(modules))
    yield Figure("import circles, for type checkers too", len(found), "0", [" ↔ ".join(one) for one in found])
    named = exceptions_by_name(parts(modules))
    yield Figure("parts named in the laws", len(named), "0", named)
    own = user_part()
    yield Figure("pages with a part of one's own", len(own), "any slot, ≤ 26 lines", own)
    inits = sorted(post_inits(modules), key=lambda one: -one[1])
    text = [f"{place}: {count}" for place, count in inits]
    yield Figure("__post_init__", len(inits), "–", text)
    yield Figure("lines of __post_init__", sum(count for _, count in inits), "–")
    largest = sorted(((text.count("\n"), path) for path, text in modules.items()), reverse=True)
    yield Figure(
        "lines of the largest file",
        largest[0][0],
        "≤ 350",
        [f"{path}: {count}" for count, path in largest[:8]],
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table; with ``--json`` everything behind it, with ``--details`` below it."""
    found = list(figures())
    if "--json" in arguments:
        print(json.dumps([vars(one) for one in found], indent=1, ensure_ascii=False))
        return 0
    width = max(len(one.what) for one in found)
    print(f"{'':{width}}  {'today':>7}  goal")
    for one in found:
        print(f"{one.what:{width}}  {one.now:>7,}  {one.goal}")
    if "--details" in arguments:
        for one in found:
            print(f"\n{one.what}: {one.now:,}")
            for line in one.details:
                print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
