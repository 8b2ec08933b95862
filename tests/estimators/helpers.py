"""Rollouts from plain lists, padded or packed, and estimators run through a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlobjectives import Estimator, Objective, PackedLayout, PaddedLayout, Rollouts, TokenLayout

LAYOUTS = ("padded", "packed")


def layout_of(mask: list[list[int]], kind: str = "padded") -> TokenLayout:
    """Ragged rows of a mask; padding is False."""
    if kind == "packed":
        bounds = torch.tensor([0, *(len(row) for row in mask)]).cumsum(0)
        return PackedLayout(bounds, torch.tensor([bool(m) for row in mask for m in row], dtype=torch.bool))
    width = max(len(row) for row in mask)
    return PaddedLayout(torch.tensor([[bool(m) for m in row] + [False] * (width - len(row)) for row in mask]))


def column(rows: list[list[float]], kind: str = "padded", fill: float = float("nan")) -> Tensor:
    """A token column laid like `layout_of`; NaN in the padding."""
    if kind == "packed":
        return torch.tensor([v for row in rows for v in row], dtype=torch.float64)
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.float64)


def rows_of(flat: Tensor, mask: list[list[int]], kind: str = "padded") -> list[list[float]]:
    """Back to ragged lists."""
    if kind == "padded":
        return [row[: len(m)] for row, m in zip(flat.tolist(), mask, strict=True)]
    result, start = [], 0
    for row in mask:
        result.append(flat[start : start + len(row)].tolist())
        start += len(row)
    return result


def rollouts_of(
    mask: list[list[int]], rewards: Any, kind: str = "padded", groups: list[int] | None = None, **columns: Any
) -> Rollouts:
    """Rollouts whose list-of-list columns are laid out, and whose other columns become tensors."""
    laid = {
        name: column(value, kind)
        if isinstance(value, list) and isinstance(value[0], list)
        else torch.as_tensor(value)
        for name, value in columns.items()
    }
    return Rollouts(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(groups if groups is not None else list(range(len(mask)))),
        layout=layout_of(mask, kind),
        **laid,
    )


def final(estimator: Estimator, rollouts: Rollouts) -> Tensor:
    """Advantages through a window of one micro-batch."""
    estimate = estimator.estimate(rollouts)
    assert rollouts.layout is not None
    window = Objective(estimator=estimator).freeze([(estimate, rollouts.layout)])
    return window.advantages(estimate, rollouts.layout)


def close(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    """Equal to an absolute tolerance, whatever the containers."""
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=tolerance,
    )
