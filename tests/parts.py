"""Every part and every named objective of the package, found by introspection, in all their options.

A new part is picked up by itself: each `Literal` and `bool` option is varied one at a time. Where an
option must be given, or a number is worth trying, add one line to `HINTS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

import rlobjectives
from rlobjectives import (
    ALGORITHMS,
    GDPO,
    GRPO,
    RLOO,
    CapabilityError,
    Component,
    Estimator,
    GivenAdvantages,
    KLPenalty,
    LossReduction,
    Objective,
    Rejection,
    SequenceMean,
    TeacherSignal,
    TokenTerm,
)
from rlobjectives.slots import slots_of
from tests.windows import Case

__all__ = [
    "ESTIMATORS",
    "HINTS",
    "OBJECTIVES",
    "PARTS",
    "PLAIN",
    "REDUCTIONS",
    "REQUIRED",
    "ROLES",
    "TERMS",
    "exact_under_cuts",
    "label",
    "of_kind",
    "suited",
    "variants",
]


def raw_reward(rollouts: Any) -> Any:
    """A user's function from rollouts to advantages."""
    return rollouts.rewards.sum(1)


REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "Combined": {"estimators": (GRPO(scale="batch"), TeacherSignal(coef=0.5))},
    "FixedBudget": {"max_tokens": 8},
    "FunctionEstimator": {"function": raw_reward, "token_level": False},
}
"""Options without a default, by class."""

HINTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "ClippedSurrogate": (
        {"clip_high": 0.28},
        {"dual_clip": 3.0},
        {"ratio_cap": 2.0},
        {"dual_clip": 1.5, "ratio_cap": 1.4, "clip_low": 0.1},
        {"log_ratio_clamp": 5.0},
    ),
    "Combined": ({"estimators": (GDPO(), RLOO()), "weights": (1.0, -0.5)},),
    "GAE": ({"trace_decay": 0.9, "discount": 0.95}, {"kl_coef": 0.1}, {"adaptive_alpha": 0.05}),
    "GDPO": ({"weights": (1.0, 0.5)}, {"weights": {"reward_1": 0.0, "reward_0": 2.0}}),
    "GRPO": ({"weights": (1.0, -0.5)}, {"ddof": 0}),
    "ImportanceCorrection": (
        {"reject": (Rejection(over="sum", high=1.0),)},
        {"reject": (Rejection(high=0.5),), "denominator": "kept"},
    ),
    "KLCov": ({"fraction": 0.3},),
    "KLPenalty": ({"coef": 0.5, "exponent_clamp": 3.0},),
    "RLOO": ({"weights": (0.5, 2.0)},),
}
"""More options worth trying, by class."""

LENIENT: Mapping[str, Any] = {"on_lost_reward": "drop", "on_observation_reward": "drop"}
"""Options of any part that refuse data which every law draws: rewards of sequences without tokens, and at observations."""

NEEDS_POSITIONS = frozenset({"Combined"})
"""Estimators that refuse packed sequences of length 0, since a sequence's number travels on its tokens."""
NEEDS_SCORES = frozenset({"GAE", "ReMax", "ReinforcePlusPlus", "TDLambda", "VTrace"})
"""Estimators that refuse a sequence of which no reward is scored."""
POSITIVE_REWARDS = frozenset({"MaxRL"})
"""Estimators that refuse negative rewards."""


def _classes() -> Iterator[type[Component]]:
    for name in sorted(rlobjectives.__all__):
        found = getattr(rlobjectives, name)
        # What a host has computed is no work of a part: it has a test of its own.
        if found is GivenAdvantages or not (isinstance(found, type) and issubclass(found, Component)):
            continue
        if dataclasses.is_dataclass(found):
            yield found


def given_options(kind: type[Any]) -> dict[str, Any]:
    """What laws always say to a part: required options, and leniency towards the data they draw."""
    names = {one.name for one in dataclasses.fields(kind)}
    lenient = {name: value for name, value in LENIENT.items() if name in names}
    return {**lenient, **REQUIRED.get(kind.__name__, {})}


def suited(objective: Objective, case: Case) -> Case:
    """The window with rewards that the objective accepts."""
    if any(f"{name}(" in repr(objective.estimator) for name in NEEDS_SCORES):
        case = dataclasses.replace(case, scored=case.scored | ~case.scored.any(1, keepdim=True))
    if any(type(part).__name__ in POSITIVE_REWARDS for part in objective.parts().values()):
        return dataclasses.replace(case, rewards=case.rewards.abs())
    if any(type(part).__name__ in NEEDS_POSITIONS for part in objective.parts().values()):
        return dataclasses.replace(case, lengths=case.lengths.clamp_min(1))
    return case


def _named(name: str) -> Objective:
    options = {
        role: given_options(getattr(rlobjectives, kind)) for role, kind in ALGORITHMS[name].parts.items()
    }
    return Objective.named(name, **{role: option for role, option in options.items() if option})


def _choices(annotation: Any) -> tuple[Any, ...]:
    if annotation is bool:
        return (False, True)
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for one in typing.get_args(annotation) for choice in _choices(one))
    return ()


def variants(kind: type[Component]) -> list[Component]:
    """The part with its defaults, with each choice of each option, and with every hint."""
    given = given_options(kind)
    options: list[Mapping[str, Any]] = [{}]
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if one.name not in given:
            options += [{one.name: choice} for choice in _choices(hints[one.name]) if choice != one.default]
    options += HINTS.get(kind.__name__, ())
    found = [kind(**given)]
    for option in options[1:]:
        with contextlib.suppress(CapabilityError):  # a choice that asks for another option beside it
            found.append(kind(**{**given, **option}))
    return found


PARTS: tuple[Component, ...] = tuple(part for kind in _classes() for part in variants(kind))


def of_kind(kind: type[Component]) -> list[Any]:
    """All variants of the parts of one kind."""
    return [part for part in PARTS if isinstance(part, kind)]


ESTIMATORS: list[Estimator] = of_kind(Estimator)
REDUCTIONS: list[LossReduction] = of_kind(LossReduction)
TERMS: list[TokenTerm] = of_kind(TokenTerm)


ROLES: Mapping[str, type[Component]] = {
    name: slot.kinds[0] for name, slot in slots_of(Objective).items() if not slot.several
}
"""The kind of part that each field of `Objective` takes."""


def label(part: Component) -> str:
    """The part and the options that differ from its defaults; the same in every process."""
    changed = {
        one.name: getattr(part, one.name)
        for one in dataclasses.fields(part)
        if getattr(part, one.name) != one.default
    }
    options = (
        f"{name}={value.__name__ if isinstance(value, types.FunctionType) else repr(value)}"
        for name, value in changed.items()
    )
    return f"{type(part).__name__}({', '.join(options)})"


def _with(part: Component) -> Objective:
    role = next(name for name, kind in ROLES.items() if isinstance(part, kind))
    return Objective(**{"estimator": GRPO(), role: part, "name": label(part)})


def exact_under_cuts(objective: Objective) -> bool:
    """Whether no part looks at one micro-batch alone, which some papers do and their options allow."""
    return not any(
        getattr(part, one.name) == "micro_batch"
        for part in objective.parts().values()
        for one in dataclasses.fields(part)
    )


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
