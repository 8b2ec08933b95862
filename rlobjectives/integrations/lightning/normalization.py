"""Whitening of estimates over a rollout: what ``normalize_advantages`` does."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.errors import CapabilityError
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.groups import group_any
from rlobjectives.maths.whitening import whiten
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Moments

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.host import TrainedModule

__all__ = ["check_normalized", "estimate_moments", "normalized_estimate"]


def check_normalized(module: TrainedModule, prompts: int | None, num_generations: int | None) -> None:
    """Refuse to whiten a rollout of one sequence, whose advantage would always be 0.

    Args:
        module: Says whether, and with what.
        prompts: Of a rollout, over all ranks; None where nobody knows.
        num_generations: Completions of each; the same.

    Raises:
        CapabilityError: Naming what to change.
    """
    one = prompts is not None and num_generations is not None and prompts * num_generations < 2
    if one and module.normalize_advantages and not module.objective.estimator.token_level:
        raise CapabilityError(
            "normalize_advantages whitens over the rollout, and a rollout has one sequence (prompts_per_step × "
            "num_generations): every advantage would be 0, for ever. Raise one of them, or turn normalize_advantages off."
        )


def estimate_moments(
    estimate: Tensor, rollouts: Rollouts, layout: TokenLayout, *, token_level: bool
) -> Moments:
    """Moments of one rank's raw advantages: the population that they are whitened over.

    Constant groups count, with their zeros. A sequence that has no scored reward does not, nor one of which nothing
    counts; a turn of a session, whose tokens share the session's reward, has one if any turn has.

    Args:
        estimate: ``[n]``, or shaped like the mask.
        rollouts: Says which sequences are scored.
        layout: Says what counts.
        token_level: Which of the two shapes it is.
    """
    scored = _scored(rollouts, token_level=token_level).to(layout.device)
    mask = layout.mask & layout.expand(scored) if token_level else layout.sequence_mask() & scored
    return Moments.of(estimate, mask)


def normalized_estimate(
    estimate: Tensor, moments: Moments, rollouts: Rollouts, layout: TokenLayout, *, token_level: bool
) -> Tensor:
    """Raw advantages over the rollout's spread: ``(A − mean) / (std + 10⁻⁸)``, ddof 1.

    What says nothing stays exactly 0: a group in which every advantage is 0, because its rewards do not differ, and
    the zeros of a sequence without a scored reward. A single 0 between others moves with them, or whitening would
    change the order of a group's answers.

    Args:
        estimate: ``[n]``, or shaped like the mask.
        moments: Of `estimate_moments`, merged over all ranks.
        rollouts: Says which sequences are scored, and belong together.
        layout: Says what counts.
        token_level: Which of the two shapes it is.

    Returns:
        Float64, same shape.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]), group_ids=torch.tensor([0, 0, 1, 1]))
        >>> layout, estimate = PaddedLayout(torch.ones(4, 1, dtype=torch.bool)), torch.tensor([0.5, -0.2, 0.0, 0.0])
        >>> moments = estimate_moments(estimate, rollouts, layout, token_level=False)
        >>> normalized_estimate(estimate, moments, rollouts, layout, token_level=False)[2:]
        tensor([0., 0.], dtype=torch.float64)
    """
    if 0.0 < float(moments.count) < 2.0:
        warnings.warn(
            "normalize_advantages whitens over the rollout, and this one has a single counted sample over all ranks: its "
            "advantage becomes 0. If that is so in every rollout, nothing is learned: let it have more sequences.",
            stacklevel=2,
        )
    groups, scored = rollouts.groups, _scored(rollouts, token_level=token_level).to(estimate.device)
    speaks = layout.segment_sum((estimate != 0).double()) > 0 if token_level else estimate != 0
    moves = group_any(speaks.to(groups.index.device), groups).to(estimate.device) & (scored | speaks)
    white = whiten(estimate, moments, ddof=1, epsilon=1e-8)
    return torch.where(layout.expand(moves) if token_level else moves, white, 0.0)


def _scored(rollouts: Rollouts, *, token_level: bool) -> Tensor:
    assert rollouts.scored is not None
    scored = rollouts.scored.any(1)
    if token_level and rollouts.sessions is not None:
        return group_any(scored, rollouts.sessions)
    return scored
