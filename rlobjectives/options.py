"""Options of a part: what each may be is said once, at its field, and checked whenever a part is made."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal, TypeVar

from rlobjectives.checks import check_choice, check_int, check_number, shown
from rlobjectives.errors import CapabilityError

__all__ = ["bounds", "check_fields", "option", "resolve_annotations"]

T = TypeVar("T")
_BOUNDS = "rlobjectives.bounds"
_PLAIN: Mapping[type, tuple[str, str]] = {
    bool: ("True or False", " In YAML write true or false, without quotes."),
    str: ("text", ""),
}


def bounds(
    *, low: float | None = None, high: float | None = None, open_low: bool = False, open_high: bool = False
) -> Mapping[str, object]:
    """The interval of a number that has no default.

    Args:
        low: The least value; None for none.
        high: The greatest value; None for none.
        open_low: Whether the least value itself is refused.
        open_high: Whether the greatest value itself is refused.

    Returns:
        The ``metadata`` of a dataclass field.

    Example:
        >>> from dataclasses import dataclass, field
        >>> from rlobjectives import FixedBudget
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Halved(FixedBudget):
        ...     share: float = field(metadata=bounds(low=0, high=1))
        >>> Halved(max_tokens=64, share=2.0)
        Traceback (most recent call last):
        ...
        rlobjectives.errors.CapabilityError: share is 2.0; expected a finite number in [0, 1].
    """
    given: dict[str, object] = {"low": low, "high": high, "open_low": open_low, "open_high": open_high}
    return {
        _BOUNDS: {name: value for name, value in given.items() if value is not None and value is not False}
    }


def option(
    default: T,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
) -> T:
    """A number with a default and the interval it must lie in; the field of a dataclass.

    Args:
        default: Its value where none is given.
        low: The least value; None for none.
        high: The greatest value; None for none.
        open_low: Whether the least value itself is refused.
        open_high: Whether the greatest value itself is refused.

    Returns:
        A dataclass field.

    Example:
        >>> from dataclasses import dataclass
        >>> from rlobjectives import GRPO
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Tempered(GRPO):
        ...     heat: float = option(1.0, low=0, open_low=True)
        >>> Tempered(heat=0.0)
        Traceback (most recent call last):
        ...
        rlobjectives.errors.CapabilityError: heat is 0.0; expected a finite number in (0, inf).
    """
    limits = bounds(low=low, high=high, open_low=open_low, open_high=open_high)
    return field(default=default, metadata=limits)


def check_fields(part: object) -> None:
    """Raise unless every option of a dataclass is what its field's type and bounds say.

    Flags, texts, choices (``Literal``), integers and numbers are checked, None where the type admits it. Other types
    are the part's own business, and a default is left alone.

    Raises:
        CapabilityError: Naming the option, what it is and what was expected.
    """
    for name, default, check in _checks(type(part)):  # type: ignore[arg-type]  # mypy takes a class for unhashable
        value = getattr(part, name)
        if value is not default:
            check(part, name, value)


_Check = Callable[[object, str, Any], None]


@functools.cache
def _checks(kind: type[Any]) -> tuple[tuple[str, object, _Check], ...]:
    found = []
    for one in dataclasses.fields(kind):
        if not one.init:  # no option: the part sets it itself, maybe later
            continue
        declared = _evaluated(one.type, kind) if isinstance(one.type, str) else one.type
        limits = _bounds_of(kind, one.name)
        check = _check_of(declared, limits)
        if limits and not _is_number(declared):
            raise TypeError(
                f"{kind.__name__}.{one.name} has bounds, but is declared {declared}; bounds are of int, float, or one "
                "of them or None. Leave them out and look at the value in check()."
            )
        if check is not None:
            found.append((one.name, one.default, check))
    return tuple(found)


def _bounds_of(kind: type, name: str) -> Mapping[str, Any]:
    """Those of the class that said them last: another default alone does not lift them."""
    for base in kind.__mro__:
        one = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if one is not None and _BOUNDS in one.metadata:
            return dict(one.metadata[_BOUNDS])
    return {}


def _check_of(declared: object, limits: Mapping[str, Any]) -> _Check | None:
    """How to check a value of a type; None for types that are not looked at."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        members = typing.get_args(declared)
        inner = [member for member in members if member is not types.NoneType]
        check = _check_of(inner[0], limits) if len(inner) == 1 else None
        if check is None or len(inner) == len(members):
            return None
        return lambda part, name, value: None if value is None else check(part, name, value)
    if typing.get_origin(declared) is Literal:
        choices = typing.get_args(declared)
        return lambda _, name, value: check_choice(name, value, choices)
    if declared is int:
        return functools.partial(_check_whole, limits)
    if declared is float:
        return lambda _, name, value: check_number(name, value, **limits)
    if isinstance(declared, type) and declared in _PLAIN:
        return functools.partial(_check_plain, declared)
    return None


def _is_number(declared: object) -> bool:
    return {int, float} >= {*(typing.get_args(declared) or (declared,))} - {types.NoneType}


def _check_whole(limits: Mapping[str, Any], part: object, name: str, value: object) -> None:
    del part
    low = limits.get("low", -(2**63))
    what = "a positive integer" if low == 1 else "" if "low" in limits else "an integer"
    check_int(name, value, low=low, what=what)
    check_number(name, value, **limits)  # a highest value, or bounds that are refused themselves


def _check_plain(kind: type, part: object, name: str, value: object) -> None:
    what, hint = _PLAIN[kind]
    if not isinstance(value, kind):
        raise CapabilityError(
            f"{name} of {type(part).__name__} is {shown(value)}; expected {what}, not {type(value).__name__}.{hint}"
        )


def resolve_annotations(kind: type) -> None:
    """Replace the annotations of a class that are texts by what they mean where the class is defined.

    Parsers of configurations evaluate those of base classes in the module of the derived class, which need not know
    the names, and then take every option for untyped. What cannot be evaluated, such as a name that only type checkers
    know, stays a text.
    """
    kind.__annotations__ = {
        name: _evaluated(declared, kind) if isinstance(declared, str) else declared
        for name, declared in inspect.get_annotations(kind).items()
    }


def _evaluated(declared: str, kind: type) -> object:
    holder = type("holder", (), {"__annotations__": {"it": declared}})
    module = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    try:
        return typing.get_type_hints(holder, module, dict(vars(kind)), include_extras=True)["it"]
    except (AttributeError, NameError, SyntaxError, TypeError):  # whatever a user's annotation may be
        return declared
