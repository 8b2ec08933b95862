"""Imports flow one way, third parties stay in the adapters, and only `distributed` talks to other ranks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlobjectives

PACKAGE = Path(rlobjectives.__file__).parent

LAYERS = (
    {"errors", "_moved"},
    {"descriptions", "masking"},
    {"checks", "options", "columns"},
    {"capabilities", "extra"},
    {"statistics", "groups"},
    {"distributed", "layouts"},
    {"rollouts", "scores", "tokens", "packing"},
    {"component", "logprobs"},
    {"token_parts"},
    {"maths"},
    {"estimators", "losses", "terms", "corrections", "reductions", "metrics"},
    {"registry", "slots", "building", "fit"},
    {"window"},
    {"functional", "objective"},
    {"__init__"},
    {"testing"},
    {"integrations"},
    {"causal_lm"},
    {"cli"},
)
"""A module imports its own layer's folder and layers above it in this list, never below."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ADAPTERS = {"integrations", "causal_lm", "cli"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def part(module: str) -> str:
    """`rlobjectives.losses.base` belongs to `losses`; the package itself to `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield child
            yield from run_time_nodes(child)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that a file imports, inside functions too."""
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = node.module == "rlobjectives" and alias.name in LEVEL
                yield node.lineno, full if is_module or full == "torch.distributed" else node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_one_way(path):
    mine = owner(path)
    assert mine in LEVEL, f"{mine} has no place in LAYERS of this test. Give it the lowest one that fits."
    wrong = []
    for line, module in imported(path):
        if module.split(".")[0] != "rlobjectives":
            continue
        theirs = part(module)
        if theirs == mine and path.parent != PACKAGE:
            continue  # a neighbour in the same folder; a cycle there would fail at import
        # Adapters may use the public names; the package's own modules import each other directly.
        if LEVEL.get(theirs, 0) > LEVEL[mine] or (theirs == "__init__" and mine not in ADAPTERS):
            wrong.append(f"{path.name}:{line} imports {module}")
    assert not wrong, f"{wrong}: {mine} may import only what comes before it in LAYERS."


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_parties_stay_in_the_adapters(path):
    if owner(path) in ADAPTERS:
        return
    allowed = sys.stdlib_module_names | {"torch", "rlobjectives"}
    wrong = [
        f"{path.name}:{line} imports {name}"
        for line, name in imported(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong, f"{wrong}: the core needs torch alone. Move it under integrations."


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_distributed_talks_to_other_ranks(path):
    if owner(path) in {"distributed", *ADAPTERS}:
        return
    wrong = [f"{path.name}:{line}" for line, name in imported(path) if name.startswith("torch.distributed")]
    wrong += [
        f"{path.name}:{node.lineno}"
        for node in run_time_nodes(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    assert not wrong, f"{wrong} uses torch.distributed. Take a Communicator."


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_compares_an_algorithms_name(path):
    names = {*rlobjectives.ALGORITHMS}
    wrong = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(leaf, ast.Constant) and leaf.value in names for leaf in ast.walk(node))
    ]
    assert not wrong, f"{wrong}: read a flag of Capabilities; a user's own algorithm has no name."


ROOMS = {"estimators", "losses", "terms", "corrections", "reductions"}
BASES = {"base", "normalized", "weights", "grouped", "mismatch", "rejection"}
"""Modules of the rooms that other parts may read: bases, and what a correction is made of."""


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if owner(path) in {*ROOMS, "maths", "metrics"} and path.name != "__init__.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_part_imports_another(path):
    wrong = []
    for line, module in imported(path):
        names = module.split(".")
        if names[0] == "rlobjectives" and len(names) > 1 and names[1] in ROOMS and names[-1] not in BASES:
            wrong.append(f"{path.name}:{line} imports {module}")
    assert not wrong, f"{wrong}: what parts share belongs in maths/, or in a base."
