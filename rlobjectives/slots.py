"""What may stand in a field of an objective or an option of a part, and how it is made from what was given."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlobjectives.checks import check_options, shown, suggestion
from rlobjectives.component import Component
from rlobjectives.errors import CapabilityError, UnknownAlgorithmError
from rlobjectives.estimators import Estimator, FunctionEstimator
from rlobjectives.registry import ALGORITHMS, resolve

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Slot", "call", "missing_options", "slots_of"]


@dataclass(frozen=True)
class Slot:
    """A place for a part, as its annotation says.

    Attributes:
        kinds: Classes of which an instance may stand there; none if that is not known. The first, where it is a
            dataclass that can be made, takes options that name no class.
        several: Whether it holds a tuple of them.
        optional: Whether None may stand there.
        function: Whether a plain function may stand there.

    Example:
        >>> from rlobjectives import Objective
        >>> kl = Slot((Objective,)).below("kl")
        >>> kl.make({"coef": 0.1}, "kl") == kl.make({"class_path": "KLPenalty", "init_args": {"coef": 0.1}}, "kl")
        True
        >>> Slot((Objective,)).below("policy_loss").no_class("TokenMean")
        'TokenMean is a LossReduction; expected a PolicyLoss'
    """

    kinds: tuple[type, ...] = ()
    several: bool = field(default=False, kw_only=True)
    optional: bool = field(default=False, kw_only=True)
    function: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, *hints: Any) -> Self:
        """The slot of an annotation, or of any of several."""
        found = list(dict.fromkeys(one for hint in hints for one in _leaves(hint)))
        return cls(
            tuple(one for one in found if isinstance(one, type) and one is not type(None)),
            several="several" in found,
            optional=type(None) in found,
            function="function" in found,
        )

    def below(self, key: str) -> Self:
        """The slot that an option leads to, several names joined by dots."""
        first, _, rest = key.partition(".")
        slot = self.of(*(_hint(kind, first) for kind in self.kinds))
        return slot.below(rest) if rest else slot

    @property
    def default(self) -> type | None:
        """The class that takes options which name none."""
        first = self.kinds[0] if self.kinds else object
        return first if dataclasses.is_dataclass(first) and not inspect.isabstract(first) else None

    @property
    def bases(self) -> tuple[type, ...]:
        """The kinds, without those that another one covers."""
        return tuple(
            one for one in self.kinds if not any(issubclass(one, base) for base in {*self.kinds} - {one})
        )

    @property
    def holds_parts(self) -> bool:
        """Whether there is something to be made from a name or a mapping."""
        return any(issubclass(one, Component) or dataclasses.is_dataclass(one) for one in self.kinds)

    def make(self, value: object, name: str, where: str = "") -> Any:
        """What stands there.

        Args:
            value: An instance; a class; ``"Name"``, ``"package.module:Class"`` or ``"package.module.Class"``; options of
                the default class; ``{"class_path": …, "init_args": …}``; a function in place of an estimator. A list of
                them where several may stand.
            name: What messages call it.
            where: Whose it is.

        Raises:
            CapabilityError: If it is none of them, or an option does not fit.
            UnknownAlgorithmError: If a name is nowhere.
        """
        label = f"{where}: {name}" if where else name
        if self.several:
            if not isinstance(value, (list, tuple)):
                raise CapabilityError(f"{label} is {shown(value)}; expected a list, each {self._expected()}.")
            one = dataclasses.replace(self, several=False)
            return tuple(one.make(each, f"{name}[{place}]", where) for place, each in enumerate(value))
        if isinstance(value, self.kinds) or (value is None and self.optional):
            return value
        kind: object = value
        options: Mapping[str, object] = {}
        if isinstance(value, Mapping):
            named = "class_path" in value
            kind, options = (
                (value["class_path"], value.get("init_args") or {}) if named else (self.default, value)
            )
            if named and (
                not isinstance(options, Mapping) or not value.keys() <= {"class_path", "init_args"}
            ):
                raise CapabilityError(
                    f"{label} is {shown(value)}; expected {{class_path: …, init_args: {{option: …}}}}."
                )
            if kind is None:
                raise CapabilityError(
                    f"{where or 'Objective'} has no {name} to take options; give the part itself, such as "
                    f"{name}=SomeClass(...), or in a file its path, {name}: 'package.module:SomeClass'."
                )
        found = self.named(kind, label) if isinstance(kind, str) else kind
        if isinstance(found, type) and issubclass(found, self.kinds):
            return _made(found, options, name, where)
        if isinstance(found, self.kinds) and not options:
            return found
        if Estimator in self.kinds and callable(found) and not isinstance(found, type):
            return _made(FunctionEstimator, {"function": found, **options}, name, where)
        said = f"{shown(value)}, which names {shown(found)}" if isinstance(kind, str) else shown(value)
        raise CapabilityError(f"{label} is {said}; expected {self._expected()}.")

    def named(self, path: str, label: str = "") -> Any:
        """What a text names: by its path, or a class of this place by its name alone.

        Raises:
            CapabilityError: If a class of that name does not fit here, or there are several.
            UnknownAlgorithmError: If there is none.
        """
        if ":" in path or "." in path:
            return resolve(path, label)
        found = {kind for base in self.kinds for kind in (base, *_descendants(base)) if kind.__name__ == path}
        found = {kind for kind in found if kind.__module__.startswith("rlobjectives.")} or found
        if len(found) == 1:
            return found.pop()
        if path in ALGORITHMS:
            raise CapabilityError(
                f"{label} is {path!r}, the name of a whole objective; expected {self._expected()}. Objective.named builds "
                "from names."
            )
        if found:
            raise CapabilityError(
                f"{label}: {len(found)} classes are called {path!r}. Give its path: package.module:Class."
            )
        known = any(kind.__name__ == path for kind in _descendants(Component))
        raise (CapabilityError if known else UnknownAlgorithmError)(f"{label}: {self.no_class(path)}.")

    def no_class(self, name: str) -> str:
        """What to say when `name` is no class of this place."""
        fitting = _names(self.kinds or (Component,))
        others = {kind.__name__: kind for base in self.families() for kind in _descendants(base)}
        if name in others and name not in fitting:
            expected = " or ".join(_with_article(kind) for kind in self.bases)
            return f"{name} is {_with_article(_role(others[name], self.families()))}; expected {expected}"
        return f"no class {shown(name)} is known.{suggestion(name, fitting, '')} Or give its path: package.module.Class"

    def no_option(self, name: str) -> str:
        """What to say when the class in this place takes no option of that name."""
        if not self.kinds:
            return f"Option {name!r} is not accepted"
        options = list(_options(self.kinds[0]))
        return (
            f"Option {name!r} is not accepted.{suggestion(name, options, '')} {self.kinds[0].__name__} takes: "
            f"{', '.join(options) or 'none'}"
        )

    @staticmethod
    def families() -> tuple[type, ...]:
        """The bases of all classes that may be named."""
        return (Component,)

    def _expected(self) -> str:
        words = " or ".join(f"an instance of {one.__name__}" for one in self.bases)
        words += " or None" if self.optional else ""
        return words + (f", such as {self.default.__name__}(...)" if self.default else "")


@functools.cache
def slots_of(kind: type) -> Mapping[str, Slot]:
    """The fields of a dataclass that hold parts."""
    slots = {one.name: Slot((kind,)).below(one.name) for one in dataclasses.fields(kind)}
    return {name: slot for name, slot in slots.items() if slot.holds_parts}


def missing_options(kind: Callable[..., Any], given: Iterable[str]) -> list[str]:
    """The options of a class that have no default and are not given."""
    parameters = inspect.signature(kind).parameters.values()
    named = [one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return [one.name for one in named if one.default is one.empty and one.name not in given]


def call(name: str, function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """What a function or class makes of arguments, which it must take.

    Raises:
        CapabilityError: If it does not.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise CapabilityError(
            f"{name} does not take {', '.join(arguments) or 'no arguments'}: {error}."
        ) from error
    except ValueError:
        pass  # what is written in C may have no signature to read
    return function(**arguments)


def _made(kind: type, options: Mapping[str, object], name: str, where: str) -> Any:
    """An instance, its own parts made as well."""
    prefix = f"{where}: " if where else ""
    if inspect.isabstract(kind):
        raise CapabilityError(
            f"{prefix}{name} is {kind.__name__}, a base of parts; name one that can be made."
        )
    slots = {option: Slot((kind,)).below(option) for option in options}
    if dataclasses.is_dataclass(kind):
        check_options(where or name, kind, options)
    if missing := missing_options(kind, options):
        theirs = where in ALGORITHMS and ALGORITHMS[where].parts.get(name) == kind.__name__
        said = f"{{{missing[0]!r}: ...}}" if theirs else f"{kind.__name__}({missing[0]}=...)"
        raise CapabilityError(
            f"{prefix}{kind.__name__} needs {', '.join(missing)}. Say it, for example {name}={said}."
        )
    return call(
        f"{prefix}{kind.__name__}",
        kind,
        {
            option: _option(value, slots[option], f"{name}.{option}", where)
            for option, value in options.items()
        },
    )


def _option(value: object, slot: Slot, name: str, where: str) -> object:
    """An option as a part takes it: a part itself, a function, or plain, with tuples in place of lists."""
    if slot.holds_parts and isinstance(value, (str, Mapping, list, tuple, type)):
        return slot.make(value, name, where)
    if slot.function and isinstance(value, str):
        return resolve(value, name)
    return _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, list):
        return tuple(_plain(one) for one in value)
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def _leaves(hint: Any) -> Iterator[Any]:
    """The classes of an annotation, and what holds them."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and not inside:
        yield hint
    elif origin is Callable:
        yield "function"
    else:
        if origin in (tuple, list, Sequence):
            yield "several"
        for one in inside:
            yield from _leaves(one)


def _hint(kind: type, name: str) -> Any:
    """Annotation of an argument of a class, also of one that it passes on to a base by **kwargs."""
    for base in kind.__mro__:
        try:
            hints = typing.get_type_hints(base.__init__)  # type: ignore[misc]
        except (AttributeError, NameError, TypeError):  # a name that only type checkers see
            continue
        if name in hints:
            return hints[name]
    return None


def _options(kind: type) -> Iterator[str]:
    seen: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        for one in list(parameters)[1:]:
            if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name not in seen:
                seen.add(one.name)
                yield one.name
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            return


def _role(kind: type, families: Iterable[type]) -> type:
    """What a class is, in the words of the places: the kind of part, a module, or data."""
    roles = {base for slot in slots_of(resolve("Objective")).values() for base in slot.kinds} | {*families}
    return next((base for base in kind.__mro__ if base in roles and base is not kind), kind.__mro__[1])


def _names(bases: Iterable[type]) -> list[str]:
    found = {kind.__name__ for base in bases for kind in (base, *_descendants(base))}
    return sorted(name for name in found if not name.startswith("_"))


def _descendants(base: type) -> Iterator[type]:
    kind: type
    for kind in base.__subclasses__():
        yield kind
        yield from _descendants(kind)


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
