"""Write down what users may rely on: names, parameters, options, algorithms, metrics and configurations.

`python tools/public_surface.py write` adds what is new to `tests/data/public_surface.json` and keeps what stands there, so
that whatever is lost is lost by hand and in review. `tests/test_public_surface.py` compares; `compare` prints the same.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

import configurations
import metrics_table
import rlobjectives
from rlobjectives import ALGORITHMS, Objective, UnknownAlgorithmError
from rlobjectives.registry import resolve

PATH = ROOT / "tests" / "data" / "public_surface.json"

NEEDS = {
    "rlobjectives.integrations.trl": "trl",
    "rlobjectives.integrations.lightning": "lightning",
    "rlobjectives.causal_lm": "lightning",
}
"""Third parties without which the modules of an adapter cannot be imported."""

REQUIRED = "required"
"""Stands where an option has no default."""

Surface = dict[str, Any]


def missing(module: str) -> str | None:
    """The third party that this environment lacks for a module, or None."""
    found = (needs for prefix, needs in NEEDS.items() if module.startswith(prefix))
    return next((needs for needs in found if importlib.util.find_spec(needs) is None), None)


def modules() -> Iterator[ModuleType]:
    """Every module of the package that this environment can import."""
    yield rlobjectives
    for one in pkgutil.walk_packages(rlobjectives.__path__, "rlobjectives."):
        if not one.name.endswith("__main__") and missing(one.name) is None:
            yield importlib.import_module(one.name)


def names() -> dict[str, list[str]]:
    """Names of every ``__all__``, by module."""
    return {module.__name__: sorted(getattr(module, "__all__", ())) for module in modules()}


def owned() -> dict[str, Any]:
    """Public classes and functions of the package, by ``module:Name`` of where they are defined."""
    found = {}
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
                found[f"{module.__name__}:{name}"] = value
    return found


def parameters(value: Any) -> list[str]:
    """Names of the parameters; after ``*``, those that only go by name, and ``**`` where any does."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class that says nothing of how it is made, such as an exception
        return []
    listed = list(signature.parameters.values())
    by_place = [one.name for one in listed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = [one.name for one in listed if one.kind is one.KEYWORD_ONLY]
    return [*by_place, "*", *by_name, *("**" for one in listed if one.kind is one.VAR_KEYWORD)]


def options(kind: type[Any]) -> dict[str, str]:
    """Options of a dataclass with their defaults, as text."""
    found = {}
    for one in dataclasses.fields(kind):
        if one.init:
            factory: Any = one.default_factory
            default = one.default if factory is dataclasses.MISSING else factory()
            # A text with an address in it is another one in every process; a name is the same.
            shown = getattr(default, "__qualname__", None) or repr(default)
            shown = type(default).__name__ if " at 0x" in shown else shown
            found[one.name] = REQUIRED if default is dataclasses.MISSING else shown
    return found


def metrics() -> dict[str, list[str]]:
    """Every declared metric: its statistic and its unit."""
    found: dict[str, list[str]] = {}
    for _, declared in metrics_table.declared():
        found |= {name: [metric.kind.__name__, metric.unit] for name, metric in declared.items()}
    for name in ALGORITHMS:
        overrides = configurations.REQUIRED.get(name, {})
        declared = Objective.named(name, **overrides).declared_metrics()
        found |= {label: [metric.kind.__name__, metric.unit] for label, metric in declared.items()}
    return dict(sorted(found.items()))


def surface() -> Surface:
    """What users may rely on today."""
    public = owned()
    return {
        "names": names(),
        "parameters": {place: parameters(value) for place, value in sorted(public.items())},
        "options": {
            place: options(value)
            for place, value in sorted(public.items())
            if isinstance(value, type) and dataclasses.is_dataclass(value)
        },
        "algorithms": {name: dict(spec.parts) for name, spec in sorted(ALGORITHMS.items())},
        "metrics": metrics(),
        "configurations": configurations.found(),
    }


# Comparing ------------------------------------------------------------------------------------------


def lost_names(stored: Mapping[str, Sequence[str]]) -> list[str]:
    """Names that their module no longer gives. A module may have become an alias of another."""
    found = []
    for path, expected in stored.items():
        if missing(path) is not None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an alias says that it is one
            try:
                module = importlib.import_module(path)
            except ImportError as error:
                found.append(f"{path} cannot be imported: {error}")
                continue
            found += [f"{path}.{name} is gone" for name in expected if not hasattr(module, name)]
    return found


def _there(stored: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for place in stored:
        found = _resolved(place) if missing(place) is None else None
        if found is not None:
            yield place, found


def _resolved(place: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return resolve(place)
        except UnknownAlgorithmError:  # told with the names
            return None


def lost_parameters(stored: Mapping[str, Sequence[str]]) -> list[str]:
    """Parameters that are gone, or no longer stand in their place."""
    found = []
    for place, value in _there(stored):
        expected, now = list(stored[place]), parameters(value)
        if not expected:
            continue
        if "**" not in now:
            now += getattr(value.__init__, "old_flags", ())  # taken with a warning
            found += [f"{place} no longer takes {name!r}" for name in expected if name not in now]
        positional = expected[: expected.index("*")]
        if now[: len(positional)] != positional:
            found.append(f"{place} takes {now} by place; it took {positional}")
    return found


def lost_options(stored: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Options that are gone or have another default; one that was required may have got one."""
    found = []
    for place, value in _there(stored):
        now = options(value)
        for name, default in stored[place].items():
            if name in getattr(value.__init__, "old_flags", ()):
                continue  # taken with a warning
            if name not in now:
                found.append(f"{place} has lost the option {name!r}")
            elif now[name] != default and default != REQUIRED:
                found.append(f"{place}: the default of {name!r} is {now[name]}; it was {default}")
    return found


def lost_algorithms(stored: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Registered names that are gone or stand for other parts."""
    found = []
    for name, parts in stored.items():
        now = dict(ALGORITHMS[name].parts) if name in ALGORITHMS else {}
        other = {role: kind for role, kind in parts.items() if now.get(role) != kind}
        found += [f"{name!r} no longer has {role}={kind}" for role, kind in other.items()]
    return found


def lost_metrics(stored: Mapping[str, Sequence[str]]) -> list[str]:
    """Metrics that nobody declares any more, or that are now another statistic."""
    now = metrics()
    found = [f"the metric {name!r} is gone" for name in stored if name not in now]
    return found + [
        f"the metric {name!r} is a {now[name]}; it was a {list(kind)}"
        for name, kind in stored.items()
        if name in now and now[name] != list(kind)
    ]


def load() -> Surface:
    """What is stored."""
    stored: Surface = json.loads(PATH.read_text(encoding="utf-8"))
    return stored


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in either; where both say something of the same, the old."""
    return {
        name: joined(entry, new[name]) if isinstance(entry, Mapping) and name in new else entry
        for name, entry in {**new, **old}.items()
    }


def write() -> None:
    """Add what is new."""
    new = surface()
    if PATH.exists():
        old = load()
        modules = old["names"]
        given = {path: sorted({*modules.get(path, ()), *own}) for path, own in new["names"].items()}
        shown = configurations.joined(old["configurations"], new["configurations"])
        new = {**joined(old, new), "names": {**modules, **given}, "configurations": shown}
    PATH.parent.mkdir(exist_ok=True)
    lines = []
    for chapter, entries in sorted(new.items()):
        rows = [
            f" {json.dumps(key)}: {json.dumps(entry, ensure_ascii=False, sort_keys=True)}"
            for key, entry in sorted(entries.items())
        ]
        lines.append(f"{json.dumps(chapter)}: {{\n" + ",\n".join(rows) + "\n}")
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def compare() -> list[str]:
    """Whatever is lost, one sentence each."""
    stored = load()
    return [
        *lost_names(stored["names"]),
        *lost_parameters(stored["parameters"]),
        *lost_options(stored["options"]),
        *lost_algorithms(stored["algorithms"]),
        *lost_metrics(stored["metrics"]),
        *(
            f"{name}: {said}"
            for name, one in stored["configurations"].items()
            for said in configurations.lost(one)
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    """Write, or compare."""
    if list(arguments) == ["write"]:
        write()
        return 0
    if list(arguments) == ["compare"]:
        found = compare()
        print("\n".join(found) or "nothing is lost")
        return int(bool(found))
    print("usage: python tools/public_surface.py write|compare", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
