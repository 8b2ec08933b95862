"""Sessions: several sequences that are turns of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import refuse_rows
from rlobjectives.errors import MissingColumnError
from rlobjectives.layouts import PackedLayout
from rlobjectives.maths.groups import group_extremes
from rlobjectives.maths.reward_sum import weighted_columns
from rlobjectives.rollouts import Groups, Rollouts

__all__ = ["Trajectories", "concatenate", "session_rewards"]


def _sessions(rollouts: Rollouts, reader: str) -> Groups:
    if rollouts.sessions is None:
        raise MissingColumnError(
            f"{reader} gives credit by session, but the rollouts carry no session_ids. Give "
            'Rollouts(session_ids=...), one integer per sequence, or choose reward_scope="segment".'
        )
    return rollouts.sessions


def session_rewards(rollouts: Rollouts, weights: tuple[float, ...] | None, reader: str) -> Tensor:
    """The one combined reward of each session, float64 ``[s]``.

    A session has one score per reward: on one of its sequences (the others unscored), or the same on
    several. Rewards of single turns belong into `Rollouts.token_rewards`. A sequence that the layout does not count
    (``sequence_mask``) says nothing about its session.

    Raises:
        CapabilityError: If a session's sequences carry different scores of the same reward.
    """
    sessions, rewards, scored = _sessions(rollouts, reader), rollouts.rewards, rollouts.scored
    assert scored is not None
    scored = scored & rollouts.tokens(reader).sequence_mask().unsqueeze(1)
    low, high = group_extremes(rewards, scored, sessions)
    refuse_rows(
        (low < high).any(1),
        "have sequences that carry different scores of the same reward",
        "Score each session once (leave its other sequences unscored, or repeat the score), and give "
        "rewards of single turns as token_rewards.",
        unit="session",
        ids=sessions.ids,
    )
    one = torch.where(high > -torch.inf, high, 0.0)
    return one.sum(1) if weights is None else weighted_columns(one, weights)


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The tokens of every session end to end, without those of sequences that the layout does not count.

    Attributes:
        layout: One packed sequence per session.
        source: Where each of its positions lies in the flattened original, int64.
        last: The session's last sequence (a row of the original), ``[s]``; without meaning where none counts.
    """

    layout: PackedLayout
    source: Tensor
    last: Tensor

    def gather(self, per_token: Tensor) -> Tensor:
        """A token column in session order."""
        return per_token.reshape(-1)[self.source]

    def scatter(self, flat: Tensor, like: Tensor) -> Tensor:
        """A session-ordered column back in the shape of ``like``, 0 where no session has a token."""
        make = torch.empty if flat.numel() == like.numel() else torch.zeros
        result = make(like.shape, dtype=flat.dtype, device=flat.device)
        result.view(-1)[self.source] = flat
        return result


def concatenate(rollouts: Rollouts, reader: str) -> Trajectories:
    """Lay the sequences of each session end to end, in the order they are given."""
    layout, sessions = rollouts.tokens(reader), _sessions(rollouts, reader)
    order, counted = torch.argsort(sessions.index, stable=True), layout.sequence_mask()
    rows = torch.arange(layout.num_sequences, device=layout.device)
    if "sequence_mask" in layout.facts:
        order = order[counted[order]]
    places = torch.arange(layout.mask.numel(), device=layout.device).view(layout.shape)
    source = layout.rows_of(places, order).reshape(-1)
    lengths = layout.with_mask(torch.ones_like(layout.mask)).local_counts().long()
    totals = torch.zeros(sessions.count, dtype=torch.int64, device=layout.device)
    bounds = totals.index_add(0, sessions.index, torch.where(counted, lengths, 0)).cumsum(0)
    return Trajectories(
        layout=PackedLayout(torch.cat([bounds.new_zeros(1), bounds]), layout.mask.reshape(-1)[source]),
        source=source,
        last=totals.scatter_reduce(0, sessions.index, torch.where(counted, rows, 0), "amax"),
    )
