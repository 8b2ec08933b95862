"""Columns of a user's own in the two records: `TokenBatch.extra` and `Rollouts.extra`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlobjectives.checks import check_device, check_finite, check_tensor, shown
from rlobjectives.errors import ShapeError

__all__ = ["check_extra", "extra_of_rollouts", "missing"]


def missing(name: str, reader: object, record: str, known: bool) -> str:
    """What to say to a part that reads a column that nobody gave."""
    reader = reader if isinstance(reader, str) else type(reader).__name__
    there = "the rollouts carry" if record == "Rollouts" else f"the {record} carries"
    give = f"{name}=..." if known else f"extra={{{name!r}: ...}}"
    return f"{reader} reads {name}, but {there} none. Give {record}({give})."


def check_extra(extra: Mapping[str, Tensor], record: object) -> Mapping[str, Tensor]:
    """Columns of a user's own, if they are tensors by name.

    Raises:
        ShapeError: If they are not, or one has the name of a field of the record.
    """
    kind = type(record)
    if not isinstance(extra, Mapping):
        raise ShapeError(f"extra is {shown(extra)}; expected columns by name.")
    for name, column in extra.items():
        if any(name == one.name for one in dataclasses.fields(kind)):  # type: ignore[arg-type]
            raise ShapeError(
                f"extra has {name!r}, which {kind.__name__} has itself. Give {kind.__name__}({name}=...)."
            )
        check_tensor(f"extra[{name!r}]", column)
    return extra


def extra_of_rollouts(extra: Mapping[str, Tensor], rollouts: Any) -> dict[str, Tensor]:
    """Columns of a user's own beside rollouts: detached, and finite where they count.

    Raises:
        ShapeError: If one is neither one entry per sequence nor one per token.
        NonFiniteError: If one has NaN or an infinity at a place that counts.
    """
    count, layout, found = rollouts.num_sequences, rollouts.layout, {}
    tokens = None if layout is None else layout.shape
    for name, column in check_extra(extra, rollouts).items():
        label, whole = f"extra[{name!r}]", tuple(column.shape) == (count,)
        if not whole and tuple(column.shape) != tokens:
            per_token = "" if tokens is None else f", or {list(tokens)}, one per token"
            raise ShapeError(
                f"{label} has shape {list(column.shape)}; expected [{count}], one entry per sequence{per_token}."
            )
        check_device(label, column, rollouts.rewards.device, "rewards")
        if column.is_floating_point() and tokens != (count,):  # else nobody knows which places count
            check_finite(label, column, rollouts.genuine if whole else rollouts.tokens(label).mask)
        found[name] = column.detach()
    return found
