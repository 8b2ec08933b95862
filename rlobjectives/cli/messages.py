"""Turn a configuration parser's report into one sentence a person can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from rlobjectives.component import Component

__all__ = ["readable"]

# Lines that say how the parser searched, not what is wrong.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes:|Errors:|Given value|Problem with given class_path"
    r"|Expected a <class 'NoneType'>|Expected a path but|Note: |tip: ",
    re.IGNORECASE,
)
_KEY = re.compile(r'Parser key "([^"]+)":?\s*(.*)')
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\S+)")


def readable(report: str) -> str:
    """Keep the place and the reason of a parser's report.

    Args:
        report: What jsonargparse says: nested, with every alternative it tried.

    Returns:
        ``key: reason``; several reasons are separated by semicolons.

    Example:
        >>> print(readable("""
        ...     Parser key "model":
        ...       Parser key "objective.estimator":
        ...         Expected a dot import path string: GDP0"""))
        model.objective.estimator: no class 'GDP0' is known. Did you mean GDPO? Or give its path: package.module.Class
    """
    keys: list[str] = []
    reasons: list[str] = []
    for raw in report.splitlines():
        line = raw.strip().removeprefix("- ").strip()
        found = _KEY.match(line)
        if found:
            keys.append(found.group(1))
            line = found.group(2)
        if line and not _NOISE.match(line):
            reasons.append(_UNKNOWN_CLASS.sub(_suggest, line))
    place = ".".join(dict.fromkeys(keys))
    reason = "; ".join(dict.fromkeys(reasons)) or report.strip()
    return f"{place}: {reason}" if place else reason


def _suggest(found: re.Match[str]) -> str:
    name = found.group(1)
    known = sorted({kind.__name__ for kind in _descendants(Component) if not kind.__name__.startswith("_")})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"no class {name!r} is known.{hint} Or give its path: package.module.Class"


def _descendants(base: type[Component]) -> Iterator[type[Component]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _descendants(kind)
