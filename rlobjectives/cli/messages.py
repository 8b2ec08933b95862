"""Turn a configuration parser's report into one sentence a person can act on."""

from __future__ import annotations

import re

from rlobjectives.checks import suggestion
from rlobjectives.cli.slots import Slot
from rlobjectives.registry import ALGORITHMS

__all__ = ["readable", "shortened"]

_LONGEST_WORD, _LONGEST_LINE = 200, 1200

# Lines that say how the parser searched, not what is wrong.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes:|Errors:|Given value|Problem with given class_path"
    r"|Expected a <class 'NoneType'>|Expected a path but|Note: |tip: |Subclass types expect one of:"
    r"|a class path \(str\)|a dict with(out)? |the following dict",
    re.IGNORECASE,
)
# What Python says inside the parser where a class or its options have the wrong form.
_NO_OPTIONS = re.compile(r"'(\w+)' object has no attribute 'keys'")
_NO_PATH = re.compile(r"argument of type '(\w+)' is not iterable|unhashable type: '(\w+)'")
_TOO_LARGE = "int too large to convert to float"
_KEY = re.compile(r'Parser key "([^"]+)":?\s*(.*)')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_UNKNOWN_OPTION = re.compile(r"Option '([^']+)' is not accepted")
_UNKNOWN_FIELD = re.compile(r"Group '([^']+)' does not accept option '([^'.]+)[^']*'")
_OTHER_KIND = re.compile(
    r"Import path \S+ does not correspond to a subclass of"
)  # another class was tried as well
_UNKNOWN_NAME = re.compile(r"""Unable to load config ['"]([^'"]*)['"]""")


def readable(report: str) -> str:
    """Keep the place and the reason of a parser's report.

    Args:
        report: What jsonargparse says: nested, with every alternative it tried.

    Returns:
        ``key: reason``; several reasons are separated by semicolons.

    Example:
        >>> lines = ['Parser key "model":', 'Parser key "estimator":', "Expected a dot import path string: GDP0"]
        >>> print(readable(chr(10).join(lines)))
        model.estimator: no class 'GDP0' is known. Did you mean GDPO? Or give its path: package.module.Class
    """
    keys: list[str] = []
    reasons: list[str] = []
    slot = Slot()
    for raw in report.splitlines():
        line = raw.strip().removeprefix("- ").strip()
        found = _KEY.match(line)
        if found:
            if found.group(1) not in keys:
                slot = slot.below(found.group(1))
            keys.append(found.group(1))
            line = found.group(2)
        filled = _CLASS.match(line)
        slot = slot.filled(filled.group(1)) if filled else slot
        if line and not _NOISE.match(line):
            reasons.append(_explained(line, slot))
    place = ".".join(dict.fromkeys(keys))
    last = place.rpartition(".")[2]
    reasons = [_UNKNOWN_NAME.sub(lambda found: _no_name(last, found.group(1)), one) for one in reasons]
    reasons = [one for one in reasons if not _OTHER_KIND.match(one)] or reasons
    reason = "; ".join(dict.fromkeys(reasons)) or report.strip()
    return shortened(f"{place}: {reason}" if place else reason)


def shortened(text: str) -> str:
    """A message in which values of thousands of characters are cut in their middle.

    Example:
        >>> print(shortened(f"weights is {'1' * 5000}; expected numbers"))  # doctest: +ELLIPSIS
        weights is 111...… (5,001 characters) …...; expected numbers
    """
    words = (_cut(one, _LONGEST_WORD) for one in re.split(r"(\s+)", text))
    return "\n".join(_cut(line, _LONGEST_LINE) for line in "".join(words).splitlines())


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}… ({len(text):,} characters) …{text[-most // 4 :]}"


def _explained(line: str, slot: Slot) -> str:
    if found := _NO_OPTIONS.fullmatch(line):
        return f"init_args is a {found.group(1)}; expected options by their names, as init_args: {{option: value}}"
    if found := _NO_PATH.fullmatch(line):
        return f"class_path is a {found.group(1) or found.group(2)}; expected the name of a class"
    if _TOO_LARGE in line:
        return "a whole number is too large where a number is expected; write one below 1e308"
    line = _UNKNOWN_CLASS.sub(lambda found: slot.no_class(found.group(1)), line)
    line = _UNKNOWN_OPTION.sub(lambda found: slot.no_option(found.group(1)), line)
    return _UNKNOWN_FIELD.sub(lambda found: slot.below(found.group(1)).no_option(found.group(2)), line)


def _no_name(key: str, name: str) -> str:
    if key != "objective":
        return f"{name!r} is no file; expected options by their names, as {key}: {{option: value}}"
    return f"no objective is named {name!r}.{suggestion(name, ALGORITHMS, '')} `rlobjectives algorithms` lists them; or give the parts"
