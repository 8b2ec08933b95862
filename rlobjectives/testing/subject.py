"""What is checked: a part inside an otherwise plain objective, or a whole objective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlobjectives.columns import COLUMNS
from rlobjectives.component import Component
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators import GRPO, Estimator
from rlobjectives.objective import Objective
from rlobjectives.reductions import LossReduction
from rlobjectives.rollouts import Rollouts
from rlobjectives.slots import slots_of
from rlobjectives.statistics import Stat
from rlobjectives.testing.cases import WHOLE, Case, Shard
from rlobjectives.testing.examples import Example
from rlobjectives.testing.words import changed
from rlobjectives.token_parts import TokenTerm
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import Window

__all__ = ["Subject", "open_window", "role_of", "subject_of"]

P = TypeVar("P", bound=Component)


@dataclass(frozen=True, eq=False)
class Subject:
    """What is checked.

    Attributes:
        name: For the report.
        objective: Whole.
        parts: Those of its parts that are under test, by field.
        metric: A function from rollouts to statistics that is under test instead.
    """

    name: str
    objective: Objective
    parts: Mapping[str, Component]
    metric: Callable[[Rollouts], Mapping[str, Stat]] | None = None

    def fresh(self) -> Objective:
        """The objective as it was given, whatever was done to another copy of it."""
        try:
            return copy.deepcopy(self.objective)
        except Exception:  # noqa: BLE001  # a law of its own says so
            return self.objective

    @property
    def refused(self) -> frozenset[str]:
        """Data that the estimator reports as an error."""
        return self.objective.estimator.refused()

    def with_part(self, scope: str, other: Component) -> Objective:
        """The objective with another part in one place."""
        changed: dict[str, Any] = {scope: other}
        for name, slot in slots_of(Objective).items():
            held = getattr(self.objective, name)
            if slot.several and self.parts[scope] in held:
                changed = {name: tuple(other if one is self.parts[scope] else one for one in held)}
        return replace(self.objective, **changed)

    def draw(self, example: Example) -> Case:
        """The window of an example, without data that the estimator reports as an error, with the parts' own columns."""
        tokens, rollouts = (
            {name: one.column for name, one in reads.items() if name not in COLUMNS}
            for reads in (self.objective.reads(), self.objective.estimator_reads())
        )
        return example.draw(self.refused).with_own(tokens, rollouts)

    @property
    def fewest(self) -> int:
        """Completions per prompt that are needed."""
        return self.objective.capabilities.min_group_size

    def of_kind(self, kind: type[P]) -> dict[str, P]:
        """The parts under test that are of a kind."""
        return {scope: part for scope, part in self.parts.items() if isinstance(part, kind)}

    @property
    def estimator(self) -> Estimator | None:
        """The estimator, if it is under test."""
        found = self.parts.get("estimator")
        return found if isinstance(found, Estimator) else None

    @property
    def reduction(self) -> LossReduction | None:
        """The reduction, if it is under test."""
        found = self.parts.get("reduction")
        return found if isinstance(found, LossReduction) else None

    @property
    def terms(self) -> dict[str, TokenTerm]:
        """The terms of the loss that are under test."""
        return self.of_kind(TokenTerm)


def role_of(part: object) -> str:
    """The field of an objective that a part is put into: one whose usual class it is, else that of its kind."""
    slots = slots_of(Objective)
    usual = [name for name, slot in slots.items() if not slot.several and isinstance(part, slot.kinds[0])]
    free = sorted(slots, key=lambda name: not slots[name].several)
    return next(iter([*usual, *(name for name in free if isinstance(part, slots[name].kinds))]), "")


def subject_of(part: Any) -> Subject:
    """Put a part into its place of an otherwise plain objective.

    Raises:
        CapabilityError: If it is nothing that an objective takes.
    """
    if isinstance(part, Objective):
        return Subject(part.name, part, part.parts())
    if callable(part) and not isinstance(part, (Component, type)):
        objective = Objective(estimator=part)
        if isinstance(part(Example().draw().rollouts()), Mapping):
            return Subject(objective.name, Objective(estimator=GRPO()), {}, part)
        return Subject(objective.name, objective, {"estimator": objective.estimator})
    role = role_of(part)
    if not role:
        raise CapabilityError(
            f"check_part was given {part!r}; expected an instance of a part (an estimator, a loss, a reduction, …), an "
            "Objective, or a function of Rollouts."
        )
    label = changed(part)
    given: dict[str, Any] = {role: (part,) if slots_of(Objective)[role].several else part}
    objective = Objective(**{"estimator": GRPO(), **given}, name=label)
    return Subject(label, objective, {scope: one for scope, one in objective.parts().items() if one is part})


def open_window(objective: Objective, case: Case, shard: Shard = WHOLE) -> tuple[Window, Tensor, TokenBatch]:
    """A frozen window of one micro-batch, its estimate, and its tokens with advantages."""
    rows = torch.arange(case.count)
    estimate = objective.estimator.estimate(
        case.rollouts(shard=Shard(packed=shard.packed, extra=shard.extra))
    )
    tokens = case.tokens(rows, shard)
    builder = objective.window()
    builder.add(estimate=estimate, layout=tokens.layout)
    if objective.capabilities.needs_prepass:
        builder.add_prepass(tokens)
    window = builder.freeze()
    return window, estimate, tokens.replace(advantages=window.advantages(estimate, tokens.layout))
