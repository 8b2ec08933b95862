"""What the version before asked by a dry run. Parts declare what they read (`Component.reads`); ask `Objective.mismatches`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.columns import COLUMNS, TAUGHT, Read, column
from rlobjectives.estimators import Estimator
from rlobjectives.objective import Objective
from rlobjectives.reductions import LossReduction

__all__ = [
    "ROLLOUT_COLUMNS",
    "TEACHER",
    "missing_columns",
    "reads_column",
    "reads_prompts",
    "silent_teacher",
    "teacher_column",
]

TEACHER = TAUGHT[0]
"""Under which a ``rollout_func`` returns a teacher's log-probabilities."""
_RESULTS = ("logprobs", "advantages", "entropy", "returns", "old_values")
ROLLOUT_COLUMNS = frozenset(name for name, one in COLUMNS.items() if not (one.follows or name in _RESULTS))
"""Columns of `Rollouts` that an estimator may read."""


def missing_columns(
    objective: Objective,
    reward_names: tuple[str, ...] | None,
    num_generations: int,
    *,
    rollout_columns: Collection[str] = ROLLOUT_COLUMNS,
    token_columns: Collection[str] = tuple(COLUMNS),
) -> tuple[str, ...]:
    """What an objective lacks where a trainer gives these columns: `Objective.mismatches`."""
    given = {*rollout_columns, *token_columns, "logprobs", "advantages"}
    offers = {name: name in given for name in COLUMNS}
    facts = TrainerFacts(reward_names=reward_names, num_generations=num_generations, offers=offers)
    return tuple(objective.mismatches(facts))


def reads_column(
    estimator: Estimator, name: str, reward_names: tuple[str, ...] | None = None, num_generations: int = 2
) -> bool:
    """Whether an estimator cannot do without a column: `Component.declared_reads`."""
    del reward_names, num_generations
    return any(one.column.name == name and one.required for one in estimator.declared_reads())


def reads_prompts(reduction: LossReduction) -> bool:
    """Whether a reduction asks the layout for the sizes of prompt groups: `Component.declared_reads`."""
    return any(one.column.name == "prompt_tokens" for one in reduction.declared_reads())


def silent_teacher(inputs: list[dict[str, Any]], completion_ids: list[list[int]]) -> str | None:
    """What to say where rows of TRL lack a teacher's log-probabilities: ``not_brought``."""
    from rlobjectives.integrations.trl.columns import not_brought

    return not_brought(inputs, completion_ids, {TEACHER: Read(column(TEACHER))})


def teacher_column(inputs: list[dict[str, Any]]) -> Tensor | None:
    """A teacher's log-probabilities as TRL pads columns: ``brought_column``."""
    from rlobjectives.integrations.trl.columns import brought_column

    return brought_column(inputs, Read(column(TEACHER)))
