"""Rewards before anybody reads them: what reward functions return, and which token rewards stand at no action."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlobjectives.errors import ShapeError
from rlobjectives.layouts import TokenLayout

__all__ = ["reward_matrix", "stray_rewards"]


def reward_matrix(
    columns: Mapping[str, Sequence[float | None]], device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Turn what reward functions return into numbers and an explicit mask of what is missing.

    ``None`` and NaN become unscored cells, never a number. Infinities are kept, and refused by
    `Rollouts`, since they are mistakes rather than absences.

    Args:
        columns: Scores of all ``n`` sequences, by reward name, in the order the weights follow.
        device: Where to put the tensors.

    Returns:
        ``rewards`` float64 ``[n, r]``, ``scored`` bool ``[n, r]``, and the names.

    Raises:
        ShapeError: If columns differ in length or hold something that is not a real number
            (a bool included: say what True is worth).

    Example:
        >>> rewards, scored, names = reward_matrix({"right": [1.0, None], "format": [0.5, 0.0]})
        >>> rewards.tolist(), scored.tolist(), names
        ([[1.0, 0.5], [0.0, 0.0]], [[True, True], [False, True]], ('right', 'format'))
    """
    lengths = {name: len(scores) for name, scores in columns.items()}
    if not columns or len(set(lengths.values())) != 1:
        raise ShapeError(f"Rewards need one score per sequence from every function; got lengths {lengths}.")
    cells: list[list[float]] = []
    flags: list[list[bool]] = []
    for name, scores in columns.items():
        for row, score in enumerate(scores):
            if score is not None and (isinstance(score, bool) or not isinstance(score, numbers.Real)):
                raise ShapeError(
                    f"reward {name!r} gave {score!r} ({type(score).__name__}) for sequence {row}; "
                    "expected a real number, or None where it cannot score."
                )
        known = [math.nan if score is None else float(score) for score in scores]
        flags.append([not math.isnan(score) for score in known])
        cells.append([0.0 if math.isnan(score) else score for score in known])
    rewards = torch.tensor(cells, dtype=torch.float64, device=device).T.contiguous()
    scored = torch.tensor(flags, dtype=torch.bool, device=device).T.contiguous()
    return rewards, scored, tuple(columns)


def stray_rewards(layout: TokenLayout, token_rewards: Tensor) -> Tensor:
    """Where a reward stands at a place that is no action: a finite number other than 0, in a sequence that counts.

    Returns:
        Bool, shaped like the mask.
    """
    reward = (token_rewards != 0) & token_rewards.isfinite() & ~layout.mask
    return reward & layout.expand(layout.sequence_mask())
