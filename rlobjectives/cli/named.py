"""``objective: gdpo`` in a configuration: the parts that a name stands for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from rlobjectives.registry import ALGORITHMS

__all__ = ["names_in_arguments", "names_in_files", "parts_of"]

_OPTION = "model.init_args.objective"


def parts_of(name: str) -> dict[str, Any]:
    """What a configuration says to get `Objective.named` of a name without overrides.

    Args:
        name: A key of `ALGORITHMS`.

    Example:
        >>> parts_of("gpg")["policy_loss"]
        {'class_path': 'rlobjectives.Reinforce', 'init_args': {}}
    """
    spec = ALGORITHMS[name]
    found: dict[str, Any] = {"name": name, **spec.settings}
    for role, kind in spec.parts.items():
        module, _, short = kind.rpartition(":")
        options = dict(spec.options.get(role, {}))
        found[role] = {"class_path": f"{module or 'rlobjectives'}.{short}", "init_args": options}
    return found


@contextlib.contextmanager
def names_in_files() -> Iterator[None]:
    """Have configuration files spelled out while they are read."""
    plain = get_loader("yaml")
    # Without these jsonargparse lets an error of the text through as it is, with a traceback.
    errors = (yaml.YAMLError,)
    set_loader("yaml", lambda text: _spelled_out(plain(text)), exceptions=errors)
    try:
        yield
    finally:
        set_loader("yaml", plain, exceptions=errors)


def names_in_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--model.init_args.objective=NAME`` put as parts, one option a part."""
    found: list[str] = []
    position = 0
    while position < len(arguments):
        option, separator, value = arguments[position].partition("=")
        given = option in (f"--{_OPTION}", "--model.objective")
        if given and not separator and position + 1 < len(arguments):
            value, position = arguments[position + 1], position + 1
        if given and value in ALGORITHMS:
            for role, part in parts_of(value).items():
                if isinstance(part, Mapping):
                    found.append(f"--{_OPTION}.{role}={part['class_path']}")
                    found += [
                        f"--{_OPTION}.{role}.init_args.{key}={one}" for key, one in part["init_args"].items()
                    ]
                else:
                    found.append(f"--{_OPTION}.{role}={part}")
        else:
            found.append(arguments[position] if separator or not given else f"{option}={value}")
        position += 1
    return found


def _spelled_out(value: Any, around: tuple[int, ...] = ()) -> Any:
    """The same with a name in place of an objective's parts replaced by them; unknown names stay, to be refused."""
    if not isinstance(value, (dict, list)):
        return value
    if id(value) in around:
        raise yaml.YAMLError("an alias (*name) stands inside its own anchor (&name), so the value never ends")
    around = (*around, id(value))
    if isinstance(value, list):
        return [_spelled_out(one, around) for one in value]
    return {
        key: parts_of(one) if key == "objective" and _is_name(one) else _spelled_out(one, around)
        for key, one in value.items()
    }


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value in ALGORITHMS
