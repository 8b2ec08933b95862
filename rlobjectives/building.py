"""From the name of an algorithm, and what is to be different, to the parts of an objective."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rlobjectives.checks import check_options, shown
from rlobjectives.component import Component
from rlobjectives.errors import CapabilityError, UnknownAlgorithmError
from rlobjectives.registry import ALGORITHMS, AlgorithmSpec, resolve

__all__ = ["build"]


def build(name: str, overrides: Mapping[str, object]) -> Any:
    """Fields of an `Objective` (or an object) for a name, with overrides applied.

    Args:
        name: A key of `ALGORITHMS`, or ``"package.module:Name"`` of an estimator class or of a callable
            that returns an `Objective`.
        overrides: By field: a part, a dictionary of options, or a plain value. Options of a part that the algorithm
            does not have make one, where the field takes a single class (``kl``, ``correction``, ``off_policy_mask``,
            ``entropy_mask``, ``value_loss``).

    Raises:
        UnknownAlgorithmError: If the name is neither.
        CapabilityError: If an override does not fit.
    """
    if not isinstance(name, str):
        raise UnknownAlgorithmError(
            f"{shown(name)} is {type(name).__name__}; expected the name of an algorithm, a text."
        )
    if name not in ALGORITHMS and ":" not in name:
        close = _similar(name)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownAlgorithmError(
            f"{shown(name)}. Known: {', '.join(sorted(ALGORITHMS))}.{hint} Or give 'package.module:Class'."
        )
    spec = ALGORITHMS.get(name)
    if spec is None:
        found = resolve(name)
        if not (isinstance(found, type) and issubclass(found, Component)):
            if not callable(found):
                raise UnknownAlgorithmError(
                    f"{shown(name)} is {type(found).__name__}; expected an estimator's class, or a function that returns an "
                    "Objective."
                )
            _check_arguments(name, found, overrides)
            made = found(**overrides)
            if not isinstance(made, resolve("Objective")):
                raise CapabilityError(
                    f"{shown(name)} gives {type(made).__name__}; expected an Objective. Name an estimator's class, or "
                    "a function that returns an Objective."
                )
            return made
        spec = AlgorithmSpec(summary="", parts={"estimator": name}, source=name)
    objective_fields = {one.name for one in dataclasses.fields(resolve("Objective"))}
    built: dict[str, object] = {"name": name, **spec.settings}
    for role in {**spec.parts, **overrides}:
        if role not in objective_fields:
            close = difflib.get_close_matches(role, objective_fields, n=1)
            raise CapabilityError(
                f"{name} has no field {role!r}; an objective has {', '.join(sorted(objective_fields))}."
                + (f" Did you mean {close[0]!r}?" if close else "")
            )
        override = overrides.get(role)
        if role in overrides and not isinstance(override, Mapping):
            built[role] = _part(name, role, override)
            continue
        kind = resolve(spec.parts[role]) if role in spec.parts else _only_class(role)
        if kind is None:
            raise CapabilityError(
                f"{name} has no {role} to take options; give the part itself, such as {role}=SomeClass(...), or in a "
                f"file its path, {role}: 'package.module:SomeClass'."
            )
        options = {**spec.options.get(role, {}), **(override or {})}  # type: ignore[dict-item]
        built[role] = _make(name, role, kind, options)
    return built


def _check_arguments(name: str, factory: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Raise unless a function that makes an objective takes these arguments."""
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise CapabilityError(
            f"{name} does not take {', '.join(arguments) or 'no arguments'}: {error}."
        ) from error
    except ValueError:
        return  # what is written in C may have no signature to read


def _similar(name: str) -> list[str]:
    """The algorithm that was meant, whatever the case and the punctuation: ``REINFORCE++`` is ``reinforce_pp``."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower().replace("++", "_pp")).strip("_")
    return [plain] if plain in ALGORITHMS else difflib.get_close_matches(plain, ALGORITHMS, n=1)


def _part(algorithm: str, role: str, given: object) -> object:
    """What was given for a field: a part as it is, and one made of the class that a text names."""
    if not isinstance(given, str) or not _holds_part(role):
        return given
    kind = resolve(given)
    if isinstance(kind, type) and issubclass(kind, Component):
        return _make(algorithm, role, kind, {})
    if isinstance(kind, Component) or (role == "estimator" and callable(kind)):
        return kind
    raise CapabilityError(
        f"{algorithm}: {role} is {shown(given)}, which names {shown(kind)}; expected the class of a part, as in "
        f"{role}='package.module:SomeClass'."
    )


def _holds_part(role: str) -> bool:
    hint = typing.get_type_hints(resolve("Objective"))[role]
    kinds = (hint, *typing.get_args(hint))
    return any(isinstance(kind, type) and issubclass(kind, Component) for kind in kinds)


def _only_class(role: str) -> Callable[..., Any] | None:
    """The class of an objective's optional part, where there is one that can be made and not a family of them."""
    objective = resolve("Objective")
    hint = typing.get_type_hints(objective)[role]
    kinds: list[type] = [one for one in typing.get_args(hint) if one is not type(None)]
    one_part = len(kinds) == 1 and issubclass(kinds[0], Component) and dataclasses.is_dataclass(kinds[0])
    return kinds[0] if one_part else None


def _make(algorithm: str, role: str, kind: Callable[..., Any], options: Mapping[str, object]) -> Any:
    if not dataclasses.is_dataclass(kind):  # a class of the user's own making says itself what it takes
        return kind(**options)
    check_options(algorithm, kind, options)
    missing = [
        one.name
        for one in dataclasses.fields(kind)
        if one.init
        and one.default is dataclasses.MISSING
        and one.default_factory is dataclasses.MISSING
        and one.name not in options
    ]
    if missing:
        raise CapabilityError(
            f"{algorithm}: {kind.__name__} needs {', '.join(missing)}. Say it, for example "
            f"Objective.named({algorithm!r}, {role}={{{missing[0]!r}: ...}})."
        )
    return kind(**options)
