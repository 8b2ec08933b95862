"""``objective: gdpo`` in a configuration: the parts that a name stands for, and paths with a colon."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from rlobjectives.building import spelled
from rlobjectives.errors import CapabilityError, UnknownAlgorithmError
from rlobjectives.registry import ALGORITHMS, resolve

__all__ = ["names_in_arguments", "names_in_files", "parts_of", "spelled_out"]

_OPTION = "model.init_args.objective"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def parts_of(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a configuration says to get `Objective.named`.

    Args:
        name: A key of `ALGORITHMS`, or ``"package.module:Name"``.
        overrides: By field, as in ``objective_args``.

    Raises:
        CapabilityError: If the name is that of a function, or an override does not fit.
        UnknownAlgorithmError: If it is nobody's.

    Example:
        >>> parts_of("gpg")["policy_loss"]
        {'class_path': 'rlobjectives.Reinforce', 'init_args': {}}
    """
    found: dict[str, Any] = _dotted(spelled(name, overrides or {}))
    if "class_path" in found:
        raise CapabilityError(
            f"objective is {name!r}, a function, which a configuration cannot hold. Name an estimator's class, or give the "
            "parts."
        )
    return found


@contextlib.contextmanager
def names_in_files() -> Iterator[None]:
    """Have configuration files spelled out while they are read."""
    plain = get_loader("yaml")
    # Without these jsonargparse lets an error of the text through as it is, with a traceback.
    errors = (yaml.YAMLError,)
    set_loader("yaml", lambda text: spelled_out(plain(text)), exceptions=errors)
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
        if given and _is_name(value):
            for role, part in parts_of(value).items():
                if isinstance(part, Mapping):
                    found.append(f"--{_OPTION}.{role}={part['class_path']}")
                    found += [
                        f"--{_OPTION}.{role}.init_args.{key}={one}" for key, one in part["init_args"].items()
                    ]
                else:
                    found.append(f"--{_OPTION}.{role}={part}")
        elif option.startswith(f"--{_OPTION}.") and separator:
            found.append(f"{option}={_dotted(value)}")
        else:
            found.append(arguments[position] if separator or not given else f"{option}={value}")
        position += 1
    return found


def spelled_out(value: Any, around: tuple[int, ...] = ()) -> Any:
    """The same with a name in place of an objective's parts replaced by them; unknown names stay, to be refused."""
    if not isinstance(value, (dict, list)):
        return value
    if id(value) in around:
        raise yaml.YAMLError("an alias (*name) stands inside its own anchor (&name), so the value never ends")
    around = (*around, id(value))
    if isinstance(value, list):
        return [spelled_out(one, around) for one in value]
    found = {key: spelled_out(one, around) for key, one in value.items()}
    objective = found.get("objective")
    if isinstance(objective, str) and _is_name(objective):
        found["objective"] = parts_of(objective, found.pop("objective_args", None))
    elif isinstance(objective, dict):
        found["objective"] = _dotted(objective)
    return found


def _is_name(value: str) -> bool:
    return value in ALGORITHMS or bool(_PATH.fullmatch(value))


def _dotted(value: Any) -> Any:
    """The same with ``package.module:Class`` as the parser writes it, ``package.module.Class``."""
    if isinstance(value, dict):
        return {key: one if key == "name" else _dotted(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dotted(one) for one in value]
    if not (isinstance(value, str) and _PATH.fullmatch(value)):
        return value
    try:
        resolve(value)
    except UnknownAlgorithmError:  # plain text with a colon; or refused where it names a class
        return value
    return value.replace(":", ".")
