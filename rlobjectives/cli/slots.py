"""Places of a configuration: what may stand there, and what it takes."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlobjectives.component import Component
from rlobjectives.errors import UnknownAlgorithmError
from rlobjectives.objective import Objective
from rlobjectives.registry import resolve

__all__ = ["Slot"]


@dataclass(frozen=True)
class Slot:
    """A place of a configuration.

    Attributes:
        kinds: Classes that may stand there; none if that is not known.
        root: Whether it is the configuration itself.

    Example:
        >>> Slot((Objective,), root=False).below("policy_loss").no_class("TokenMean")
        'TokenMean is a LossReduction; expected a PolicyLoss'
    """

    kinds: tuple[type, ...] = ()
    root: bool = True

    def below(self, key: str) -> Slot:
        """The place that a key leads to, several names joined by dots."""
        first, _, rest = key.partition(".")
        if self.root:
            from lightning.pytorch import LightningDataModule, LightningModule

            roots: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
            found: tuple[type, ...] = (roots[first],) if first in roots else ()
        else:
            found = tuple(one for kind in self.kinds for one in _classes(_hint(kind, first)))
        slot = Slot(found, root=False)
        return slot.below(rest) if rest else slot

    def filled(self, path: str) -> Slot:
        """The place with a class in it, which says what its keys are."""
        try:
            found = resolve(":".join(path.rpartition(".")[::2]))
        except UnknownAlgorithmError:
            return Slot(root=False)
        return Slot((found,) if isinstance(found, type) else (), root=False)

    def no_class(self, name: str) -> str:
        """What to say when `name` is no class of this place."""
        fitting = _names(self.kinds or (Component,))
        others = {kind.__name__: kind for base in _bases() for kind in _descendants(base)}
        if name in others and name not in fitting:
            expected = " or ".join(_with_article(kind.__name__) for kind in self.kinds)
            return f"{name} is {_with_article(_role(others[name]).__name__)}; expected {expected}"
        hint = _hint_of(name, fitting)
        return f"no class {name!r} is known.{hint} Or give its path: package.module.Class"

    def no_option(self, name: str) -> str:
        """What to say when the class in this place takes no option of that name."""
        if not self.kinds:
            return f"Option {name!r} is not accepted"
        kind = self.kinds[0]
        options = list(_options(kind))
        return (
            f"Option {name!r} is not accepted.{_hint_of(name, options)} {kind.__name__} takes: "
            f"{', '.join(options) or 'none'}"
        )


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


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        if hint is not type(None):
            yield hint
        return
    for one in typing.get_args(hint):
        yield from _classes(one)


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


def _bases() -> tuple[type, ...]:
    from lightning.pytorch import LightningDataModule, LightningModule

    return Component, LightningModule, LightningDataModule


def _role(kind: type) -> type:
    """What a class is, in the words of the places: the kind of part, a module, or data."""
    roles = {one for name in Objective.__init__.__annotations__ for one in _classes(_hint(Objective, name))}
    roles |= set(_bases())
    return next((base for base in kind.__mro__ if base in roles and base is not kind), kind.__mro__[1])


def _names(bases: Iterable[type]) -> list[str]:
    found = {kind.__name__ for base in bases for kind in (base, *_descendants(base))}
    return sorted(name for name in found if not name.startswith("_"))


def _descendants(base: type) -> Iterator[type]:
    kind: type
    for kind in base.__subclasses__():
        yield kind
        yield from _descendants(kind)


def _hint_of(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
