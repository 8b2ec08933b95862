"""From the name of an algorithm, and what is to be different, to the fields of an objective."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from rlobjectives.checks import shown, suggestion
from rlobjectives.component import Component
from rlobjectives.errors import CapabilityError, UnknownAlgorithmError
from rlobjectives.registry import ALGORITHMS, AlgorithmSpec, resolve
from rlobjectives.slots import call

__all__ = ["build", "spelled"]


def build(name: str, overrides: Mapping[str, object]) -> Any:
    """Fields of an `Objective` (or an object) for a name, with overrides applied.

    Args:
        name: A key of `ALGORITHMS`, or ``"package.module:Name"`` of an estimator class or of a callable
            that returns an `Objective`.
        overrides: By field: a plain value, or a part in any of the ways that an `Objective` takes one; options without a
            class are those of the part that the algorithm has.

    Raises:
        UnknownAlgorithmError: If the name is neither.
        CapabilityError: If an override does not fit.
    """
    found = spelled(name, overrides)
    if "class_path" not in found:
        return found
    made = call(name, resolve(name), overrides)
    if not isinstance(made, resolve("Objective")):
        raise CapabilityError(
            f"{shown(name)} gives {type(made).__name__}; expected an Objective. Name an estimator's class, or "
            "a function that returns an Objective."
        )
    return made


def spelled(name: str, overrides: Mapping[str, object]) -> dict[str, Any]:
    """The same as a configuration says it: the parts of the algorithm as ``class_path`` and ``init_args``.

    Args:
        name: As for `build`.
        overrides: As for `build`.

    Returns:
        The fields; or ``class_path`` and ``init_args``, where the name is that of a function.

    Raises:
        UnknownAlgorithmError: If the name is neither.
        CapabilityError: If there is no field of that name.

    Example:
        >>> spelled("gpg", {"policy_loss": {"base": "behavior"}})["policy_loss"]
        {'class_path': 'rlobjectives.Reinforce', 'init_args': {'base': 'behavior'}}
    """
    spec = _spec(name)
    if spec is None:
        return {"class_path": name.replace(":", "."), "init_args": dict(overrides)}
    known = [one.name for one in dataclasses.fields(resolve("Objective"))]
    fields: dict[str, Any] = {"name": name, **spec.settings}
    for role in (*spec.parts, *(one for one in overrides if one not in spec.parts)):
        if role not in known:
            raise CapabilityError(
                f"{name} has no field {role!r}; an objective has {', '.join(sorted(known))}.{suggestion(role, known)}"
            )
        given = overrides.get(role, {})
        if role in spec.parts and isinstance(given, Mapping) and "class_path" not in given:
            path = spec.parts[role].replace(":", ".")
            options = {**spec.options.get(role, {}), **given}
            given = {"class_path": path if "." in path else f"rlobjectives.{path}", "init_args": options}
        fields[role] = given
    return fields


def _spec(name: str) -> AlgorithmSpec | None:
    """What a name stands for; None for a function that makes the objective."""
    if not isinstance(name, str):
        raise UnknownAlgorithmError(
            f"{shown(name)} is {type(name).__name__}; expected the name of an algorithm, a text."
        )
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    # Whatever the case and the punctuation: REINFORCE++ is reinforce_pp.
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower().replace("++", "_pp")).strip("_")
    unknown = UnknownAlgorithmError(
        f"{shown(name)}. Known: {', '.join(sorted(ALGORITHMS))}.{suggestion(plain, ALGORITHMS)} Or give "
        "'package.module:Class'."
    )
    if ":" not in name and "." not in name:
        raise unknown
    try:
        found = resolve(name)
    except UnknownAlgorithmError as error:
        raise (error if ":" in name or not suggestion(plain, ALGORITHMS) else unknown) from error
    if isinstance(found, type) and issubclass(found, Component):
        return AlgorithmSpec(summary="", parts={"estimator": name}, source=name)
    if not callable(found):
        raise UnknownAlgorithmError(
            f"{shown(name)} is {type(found).__name__}; expected an estimator's class, or a function that returns an "
            "Objective."
        )
    return None
