"""Laws about parts as objects: copies, what ranks compare, what is declared, what an exchange costs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import torch

from rlobjectives.columns import COLUMNS
from rlobjectives.component import Component
from rlobjectives.errors import RLObjectivesError
from rlobjectives.objective import Objective
from rlobjectives.testing.compare import LawError, assert_equal, require
from rlobjectives.testing.examples import Example
from rlobjectives.testing.simulate import CountingCommunicator, Outcome, whole
from rlobjectives.testing.subject import Subject, open_window

__all__ = ["agreement", "collectives", "copies", "options", "reads"]

_NONSENSE = "no value of this option"
_PLAIN = (bool, int, float)


def copies(subject: Subject, example: Example) -> None:
    """A pickled part and a deep copy give the same words and numbers."""
    case, original = subject.draw(example), subject.fresh()
    expected = whole(original, case)
    for how, duplicate in (
        ("pickled", lambda one: pickle.loads(pickle.dumps(one))),  # noqa: S301  # made here
        ("copied", copy.deepcopy),
    ):
        try:
            twin: Objective = duplicate(subject.objective)
        except Exception as error:
            raise LawError(f"it cannot be {how}: {error}") from error
        same = twin.description == subject.objective.description
        require(same, f"{how}, it is {twin.description} instead of {subject.objective.description}")
        assert_equal(whole(twin, case), expected)


def agreement(subject: Subject, example: Example) -> None:
    """Two parts that compute different numbers have different descriptions, by which ranks are compared."""
    case = subject.draw(example)
    for scope, part in subject.parts.items():
        for option, other in siblings(part):
            with suppress(RLObjectivesError):  # a value that does not go with the other parts
                twin = subject.with_part(scope, other)
                if twin.descriptions()[scope] != subject.objective.descriptions()[scope]:
                    continue
                if _differ(whole(twin, case), whole(subject.fresh(), case)):
                    raise LawError(
                        f"{option} of {type(part).__name__} changes the numbers and is not compared: two ranks with "
                        "different ones would go on together. Keep it as an attribute that may_differ does not name."
                    )


def _differ(one: Outcome, other: Outcome) -> bool:
    try:
        assert_equal(one, other)
    except LawError:
        return True
    return False


def siblings(part: Component) -> Iterator[tuple[str, Component]]:
    """The part with one of its options at another value, for each option of which one can be made up."""
    given, hints = options_of(part), hints_of(type(part))
    for name, value in given.items():
        for other in _others(value, hints.get(name)):
            with suppress(Exception):  # a value that the part refuses
                yield name, type(part)(**{**given, name: other})
                break


def options_of(part: Component) -> dict[str, Any]:
    """What a part was made with: by the names of its constructor, from its attributes."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(part)).parameters.items():
        known = [one for one in (name, f"_{name}") if hasattr(part, one)]
        if known:
            given[name] = getattr(part, known[0])
        elif parameter.default is not parameter.empty:
            given[name] = parameter.default
    return given


def _others(value: object, hint: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (type(value)(other) for other in (value + 1, value * 0.5, value + 0.25, value - 1))
    elif value is None:
        yield from (0.5, 1, 2.0, *choices(hint))
    elif isinstance(value, tuple) and value and all(isinstance(one, (int, float)) for one in value):
        yield tuple(one + 1.0 for one in value)
    yield from (choice for choice in choices(hint) if choice != value)


def hints_of(kind: type) -> dict[str, Any]:
    """The types of a part's options, as far as they can be found."""
    with suppress(NameError):
        return typing.get_type_hints(
            kind if dataclasses.is_dataclass(kind) else vars(kind).get("__init__", kind)
        )
    return {}


def choices(hint: object) -> tuple[Any, ...]:
    """The values of a flag, or of a `Literal`, alone or beside others."""
    if hint is bool:
        return (False, True)
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(choice for one in typing.get_args(hint) for choice in choices(one))
    return ()


def options(subject: Subject, example: Example) -> None:
    """A value that is none of an option's is refused when the part is built."""
    del example
    for part in subject.parts.values():
        given, hints = options_of(part), hints_of(type(part))
        for name in given:
            hint = hints.get(name)
            if not (choices(hint) or any(kind in (hint, *typing.get_args(hint)) for kind in _PLAIN)):
                continue
            try:
                type(part)(**{**given, name: _NONSENSE})
            except Exception:  # noqa: BLE001, S112  # refused, in whatever words
                continue
            raise LawError(
                f"{type(part).__name__} takes {name}={_NONSENSE!r}. The options of a dataclass are checked by their types; "
                "check others in __init__."
            )


def reads(subject: Subject, example: Example) -> None:
    """With no other columns than those it declares, nothing is missing and nothing changes."""
    case, objective = subject.draw(example), subject.fresh()
    window, _, tokens = open_window(objective, case)
    declared = {*objective.columns(), "advantages"}
    absent = {name: None for name in case.columns if name not in declared and hasattr(tokens, name)}
    expected, found = window.loss(tokens), window.loss(tokens.replace(**absent))
    same = torch.equal(found.loss, expected.loss)
    require(same, "the loss changes without columns that it does not say it reads")
    if subject.estimator is not None:
        rollouts = case.rollouts()
        there = (
            name
            for name, one in COLUMNS.items()
            if hasattr(rollouts, name) and name not in objective.estimator_reads()
        )
        less: dict[str, Any] = dict.fromkeys(there)
        same = torch.equal(
            subject.estimator.estimate(rollouts),
            subject.estimator.estimate(dataclasses.replace(rollouts, **less)),
        )
        require(same, "the estimate changes without columns that it does not say it reads")


def collectives(subject: Subject, example: Example) -> None:
    """One exchange opens a window, one more for each round of a pre-pass, and one reports it."""
    objective, case = subject.fresh(), subject.draw(example)
    communicator = CountingCommunicator()
    estimate = objective.estimator.estimate(case.rollouts())
    builder = objective.window(communicator)
    micro_batches = []
    for rows in torch.arange(case.count).split(max(1, case.count // 2)):
        tokens = case.tokens(rows)
        micro_batches.append((estimate[rows], tokens))
        builder.add(estimate=estimate[rows], layout=tokens.layout)
        if objective.capabilities.needs_prepass:
            builder.add_prepass(tokens)
    require(communicator.collectives == 0, "adding a micro-batch exchanges something")
    window = builder.freeze()
    # One more where a statistic needs another's result: final advantages, earlier rounds, which tokens stay.
    more = [
        len(part.rounds()) - 1 + part.prepass_reads_advantages + part.shrinks_denominator
        for part in objective.token_parts().values()
        if part.required().needs_prepass
    ]
    opened = communicator.collectives
    require(1 <= opened <= 1 + max([0, *more]), f"opening a window took {opened} exchanges")
    outputs = [
        window.loss(tokens.replace(advantages=window.advantages(part, tokens.layout)))
        for part, tokens in micro_batches
    ]
    require(communicator.collectives == opened, "advantages or a loss exchange something")
    window.summarize(outputs)
    require(communicator.collectives == opened + 1, "the report takes more than one exchange")
