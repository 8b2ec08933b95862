"""Rewards given at tokens: those that stand at no action are refused, credited to the action before, or dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.columns import read
from rlobjectives.errors import CapabilityError
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.sessions import Trajectories
from rlobjectives.rollouts import Rollouts
from rlobjectives.scores import stray_rewards

__all__ = ["AT_THE_END", "AT_TOKENS", "token_rewards"]

AT_TOKENS = (read("token_rewards", required=False),)
"""What an estimator reads that credits rewards given at tokens."""
AT_THE_END = (read("truncated", required=False), read("bootstrap_values", required=False))
"""What one reads that asks what would have followed a truncated sequence."""


def token_rewards(
    rollouts: Rollouts,
    reader: str,
    on_observation_reward: str,
    on_lost_reward: str,
    sessions: Trajectories | None = None,
) -> Tensor | None:
    """`Rollouts.token_rewards` with nothing at a place that is no action, where that matters.

    A finite number other than 0 under a false mask is a reward; NaN and infinity are not, like whatever else a masked
    place may hold.

    Args:
        rollouts: The rewards, and what was found about them at the boundary.
        reader: Who asks, for messages.
        on_observation_reward: ``"error"`` refuses a reward at a place that is no action; ``"credit"`` adds it to the
            last action token before it; ``"drop"`` drops it.
        on_lost_reward: ``"error"`` refuses a reward to be credited that no action stands before; ``"drop"`` drops it.
        sessions: What is one trajectory, where that is not each sequence.

    Returns:
        Shaped like the mask, or None without token rewards. The same tensor where nothing has to be moved. No host
        sync then, nor for crediting.

    Raises:
        CapabilityError: If a reward is refused.
    """
    rewards = rollouts.token_rewards
    # What Rollouts found at the boundary; the device is asked again only where something is wrong.
    if rewards is None or not rollouts.misplaced or on_observation_reward == "drop":
        return rewards
    layout = rollouts.tokens(reader)
    stray = stray_rewards(layout, rewards)
    if on_observation_reward == "error":
        _refuse(
            layout,
            rewards,
            stray,
            f"stand at places that are no action, and {reader} reads them at actions only",
            'Give each at the action it is for, set on_observation_reward="credit" to add it to the last action token '
            'before it, or on_observation_reward="drop".',
        )
    if sessions is None:
        credited, orphans = _credited(layout, rewards, stray)
    else:
        flat = _credited(sessions.layout, sessions.gather(rewards), sessions.gather(stray))
        credited, orphans = (sessions.scatter(column, layout.mask) for column in flat)
    if rollouts.unanchored and on_lost_reward == "error":
        _refuse(
            layout,
            rewards,
            orphans,
            f"have no action token before them that {reader} could credit",
            'Give each at an action, or set on_lost_reward="drop".',
        )
    return credited


def _credited(layout: TokenLayout, rewards: Tensor, stray: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards with the stray ones added to the last action before them; and which of those have none before them."""
    # The last action at or before a place is the k-th of its sequence: one bin for each, and one for what comes before.
    ordinal = layout.cumulative_sum(layout.mask.double()).long()
    rows = torch.arange(layout.num_sequences, device=layout.device)
    bins = (layout.expand(rows) * (layout.width + 1) + ordinal).reshape(-1)
    held = torch.where(layout.mask | stray, rewards, 0.0).double().reshape(-1)
    sums = held.new_zeros(layout.num_sequences * (layout.width + 1)).index_add_(0, bins, held)
    return layout.select(sums[bins].view(layout.shape).to(rewards.dtype)), stray & (ordinal == 0)


def _refuse(layout: TokenLayout, rewards: Tensor, bad: Tensor, what: str, remedy: str) -> None:
    places = bad.nonzero()
    if not len(places):
        return
    rows = layout.expand(torch.arange(layout.num_sequences, device=layout.device))
    everywhere = layout.with_mask(torch.ones_like(layout.mask))
    position = everywhere.cumulative_sum(torch.ones_like(rewards)).long() - 1
    shown = [
        f"{reward:g} in sequence {row} at position {place}"
        for row, place, reward in zip(
            rows[bad][:5].tolist(), position[bad][:5].tolist(), rewards[bad][:5].tolist(), strict=True
        )
    ]
    more = ", …" if len(places) > 5 else ""
    raise CapabilityError(
        f"{len(places):,} token rewards other than 0 {what} ({', '.join(shown)}{more}). {remedy}"
    )
