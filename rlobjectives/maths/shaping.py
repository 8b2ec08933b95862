"""Rewards before credit: the reward of a sequence, KL-shaped token rewards, overlong penalties."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlobjectives.checks import (
    check_choice,
    check_finite,
    check_number,
    check_positive_int,
    check_tensor,
    refuse_rows,
)
from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.maths.divergences import kl_estimate
from rlobjectives.maths.reward_sum import RewardSum
from rlobjectives.rollouts import Rollouts

__all__ = [
    "REWARD_KL",
    "check_kl_options",
    "overlong_penalty",
    "refuse_lost_rewards",
    "refuse_unscored",
    "sequence_rewards",
    "shaped_token_rewards",
]

REWARD_KL = ("k1", "k2", "k3", "abs")


def sequence_rewards(
    rollouts: Rollouts,
    reward: RewardSum,
    reader: str,
    on_lost_reward: str,
    *,
    unscored: Literal["error", "zero"] = "error",
) -> Tensor:
    """The combined reward of each sequence, float64 ``[n]``, for the credit of its tokens.

    Args:
        rollouts: Rewards, and where they are known.
        reward: They, added up.
        reader: Who asks, for messages.
        on_lost_reward: ``"error"`` refuses a reward other than 0 without an action token; ``"drop"`` drops it.
        unscored: ``"zero"`` if the reader itself leaves out sequences without any scored reward. Nobody else may
            take such a sequence for one of reward 0.

    Raises:
        CapabilityError: If a reward other than 0 has no action token to go to, or a sequence with action tokens
            has no reward.
    """
    rewards, scored = reward.total.squeeze(1), reward.scored.squeeze(1)
    layout = rollouts.tokens(reader)
    # What Rollouts found at the boundary; the device is asked again only where something is wrong.
    if on_lost_reward == "error" and rollouts.uncredited:
        refuse_lost_rewards(torch.where(layout.sequence_mask(), rewards, 0.0), layout.local_counts(), reader)
    if unscored == "error" and rollouts.unscored:
        refuse_unscored(scored | ~layout.sequence_mask(), layout.local_counts(), reader)
    return rewards


def refuse_unscored(scored: Tensor, counts: Tensor, reader: str, session_ids: Tensor | None = None) -> None:
    """Raise if a sequence (of ``session_ids``: a session) with action tokens has no scored reward at all."""
    refuse_rows(
        ~scored & (counts > 0),
        f"have no scored reward, and {reader} would have to take that for a reward of 0",
        "Score them, mask them out of the layout, or leave them out of the rollouts.",
        unit="sequence" if session_ids is None else "session",
        ids=session_ids,
    )


def refuse_lost_rewards(
    rewards: Tensor, counts: Tensor, reader: str, session_ids: Tensor | None = None
) -> None:
    """Raise if a sequence (of ``session_ids``: a session) without action tokens has a reward other than 0."""
    refuse_rows(
        (rewards != 0) & (counts == 0),
        f"have a reward other than 0 but no action token that {reader} could credit",
        'Mask in at least one token, set that reward to 0, or set on_lost_reward="drop".',
        unit="sequence" if session_ids is None else "session",
        ids=session_ids,
    )


def shaped_token_rewards(
    rollouts: Rollouts, rewards: Tensor | None, coef: float, estimator: str, reader: str
) -> Tensor | None:
    """Token rewards minus ``coef`` times the divergence from the reference, at action tokens.

        r̃ₜ = rₜ − β·k(ℓₜ − ℓₜʳᵉᶠ)

    Args:
        rollouts: With ``coef`` > 0, its `old_logprobs` and `ref_logprobs`.
        rewards: What is given at tokens, from `token_rewards`.
        coef: β ≥ 0.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"`` (see `kl_estimate`).
        reader: Who asks, for messages.

    Returns:
        Shaped like the mask, or None when there is no token reward at all. A new tensor.
    """
    if coef == 0.0:
        return rewards
    layout = rollouts.tokens(reader)
    old, reference = rollouts.need("old_logprobs", reader), rollouts.need("ref_logprobs", reader)
    penalty = kl_estimate(layout.select(old - reference), estimator)[0].mul(-coef)
    return penalty if rewards is None else penalty + layout.select(rewards)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft punishment of long answers, as one more reward column.

        0 up to L_max − L_c,   ((L_max − L_c) − L) / L_c up to L_max,   −1 beyond

    Give it to the estimator only and keep it out of the scores you report, or the accuracy you watch
    will be about length.

    Args:
        lengths: Response tokens, ``[n]``: ``layout.token_counts()``, or the true lengths where the mask
            drops truncated answers.
        max_tokens: L_max, tokens.
        buffer_tokens: L_c, tokens, at most L_max.

    Returns:
        Float64 ``[n]`` in [−1, 0].

    Raises:
        CapabilityError: Unless 1 ≤ ``buffer_tokens`` ≤ ``max_tokens``.
        ShapeError: Unless the lengths are ``[n]`` numbers.
        NonFiniteError: If a length is NaN or infinite. (Integers, which cannot be, cost no look at the device.)

    Source:
        DAPO, arXiv:2503.14476, Eq. 13. AReaL's variant ``min(−exceed/buffer·factor, 0)`` has no lower bound.

    Example:
        >>> overlong_penalty(torch.tensor([70, 90, 101]), max_tokens=100, buffer_tokens=20)
        tensor([ 0.0000, -0.5000, -1.0000], dtype=torch.float64)
    """
    for name, value in (("max_tokens", max_tokens), ("buffer_tokens", buffer_tokens)):
        check_positive_int(name, value)
    if buffer_tokens > max_tokens:
        raise CapabilityError(
            f"buffer_tokens is {buffer_tokens}; expected at most max_tokens ({max_tokens})."
        )
    check_tensor("lengths", lengths)
    if lengths.dim() != 1 or lengths.dtype is torch.bool or lengths.is_complex():
        raise ShapeError(
            f"lengths has shape {list(lengths.shape)} and dtype {lengths.dtype}; expected [n] counts."
        )
    if lengths.is_floating_point():
        check_finite("lengths", lengths)
    return ((max_tokens - buffer_tokens - lengths.double()) / buffer_tokens).clamp(-1.0, 0.0)


def check_kl_options(coef: float, estimator: str) -> None:
    """Raise unless the options of KL-shaped rewards are in range."""
    check_number("kl_coef", coef, low=0.0)
    check_choice("kl_estimator", estimator, REWARD_KL)
