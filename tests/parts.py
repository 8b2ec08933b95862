"""Every part and every named objective of the package, found by introspection, in all their options.

A new part is picked up by itself: each `Literal` and `bool` option is varied one at a time. Where an
option must be given, add one line to `VALUES`; numbers worth trying are the part's `examples`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import rlobjectives
from rlobjectives import (
    ALGORITHMS,
    GDPO,
    GRPO,
    RLOO,
    CapabilityError,
    Combined,
    Component,
    GivenAdvantages,
    KLPenalty,
    Objective,
    SequenceMean,
    TeacherSignal,
)
from rlobjectives.slots import slots_of
from rlobjectives.testing.objects import choices
from rlobjectives.testing.words import changed

__all__ = ["OBJECTIVES", "PARTS", "PLAIN", "ROLES", "VALUES", "given_options", "label", "variants"]


def raw_reward(rollouts: Any) -> Any:
    """A user's function from rollouts to advantages."""
    return rollouts.rewards.sum(1)


VALUES: Mapping[str, Any] = {
    "estimators": (GRPO(scale="batch"), TeacherSignal(coef=0.5)),
    "max_tokens": 8,
    "function": raw_reward,
    "token_level": False,
}
"""Values of options without a default, and of those that depend on them, by option."""
LENIENT: Mapping[str, Any] = {"on_lost_reward": "drop", "on_observation_reward": "drop"}
"""Options of any part that refuse data which every law draws: rewards of sequences without tokens, and at observations."""


def _classes() -> Iterator[type[Component]]:
    for name in sorted(rlobjectives.__all__):
        found = getattr(rlobjectives, name)
        # What a host has computed is no work of a part: it has a test of its own.
        if found is GivenAdvantages or not (isinstance(found, type) and issubclass(found, Component)):
            continue
        if dataclasses.is_dataclass(found) and not inspect.isabstract(found):
            yield found


def given_options(kind: type[Any]) -> dict[str, Any]:
    """What laws always say to a part: required options, and leniency towards the data they draw."""
    return {
        one.name: {**VALUES, **LENIENT}[one.name]
        for one in dataclasses.fields(kind)
        if one.name in LENIENT or one.name in VALUES
    }


def _named(name: str) -> Objective:
    options = {
        role: given_options(getattr(rlobjectives, kind)) for role, kind in ALGORITHMS[name].parts.items()
    }
    return Objective.named(name, **{role: option for role, option in options.items() if option})


def variants(kind: type[Component]) -> list[Component]:
    """The part with its defaults, with each choice of each option, and with every example."""
    given = given_options(kind)
    options: list[Mapping[str, Any]] = [{}]
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if one.name not in given:
            options += [{one.name: choice} for choice in choices(hints[one.name]) if choice != one.default]
    options += kind.examples
    found = [kind(**given)]
    for option in options[1:]:
        with contextlib.suppress(CapabilityError):  # a choice that asks for another option beside it
            found.append(kind(**{**given, **option}))
    return found


PARTS: tuple[Component, ...] = (
    *(part for kind in _classes() for part in variants(kind)),
    Combined(estimators=(GDPO(), RLOO()), weights=(1.0, -0.5)),
)


ROLES: Mapping[str, type[Component]] = {
    name: slot.kinds[0] for name, slot in slots_of(Objective).items() if not slot.several
}
"""The kind of part that each field of `Objective` takes."""

label = changed
"""The part and the options that differ from its defaults; the same in every process."""


def _with(part: Component) -> Objective:
    role = next(name for name, kind in ROLES.items() if isinstance(part, kind))
    return Objective(**{"estimator": GRPO(), role: part, "name": label(part)})


def _all() -> dict[str, Objective]:
    found = {name: _named(name) for name in ALGORITHMS}
    for part in PARTS:
        if any(isinstance(part, kind) for kind in ROLES.values()):
            found[label(part)] = _with(part)
    found["everything"] = Objective(
        estimator=GDPO(),
        reduction=SequenceMean(),
        kl=KLPenalty(coef=0.1, estimator="ratio_k3"),
        entropy_coef=0.01,
    )
    return found


OBJECTIVES: Mapping[str, Objective] = _all()
"""Every named algorithm, and every variant of every part inside an otherwise plain objective."""

PLAIN: list[str] = [
    name
    for name in OBJECTIVES
    if name in ALGORITHMS or name == "everything" or name in {label(variants(kind)[0]) for kind in _classes()}
]
"""Every named algorithm and every part as it comes: for laws that options cannot break."""
