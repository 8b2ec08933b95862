"""Group statistics in float64: any ids, any sizes, interleaved, with missing cells.

Two passes (mean, then squared deviations), and "no spread" is decided by comparing the values, never on
a standard deviation that rounding left near zero. Values are compared exactly, unless the caller says what rounding
may have put between them: what sums of rewards differ by is the business of `RewardSum.tolerance`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import check_choice
from rlobjectives.errors import CapabilityError
from rlobjectives.masking import select
from rlobjectives.rollouts import Groups, Rollouts

__all__ = [
    "GroupMoments",
    "check_singletons",
    "group_any",
    "group_extremes",
    "group_largest",
    "group_moments",
    "group_sum",
    "others_constant",
    "others_m2",
]


def group_sum(values: Tensor, groups: Groups) -> Tensor:
    """Sum each column of ``[n, r]`` within its group.

    Returns:
        ``[g, r]``, in the order of ``groups.ids``.
    """
    return _by_column(
        lambda column: column.new_zeros(groups.count).scatter_add_(0, groups.index, column),
        groups.count,
        values,
    )


def _by_column(function: Callable[..., Tensor], rows: int, *matrices: Tensor) -> Tensor:
    """Each column by itself, of a single one without a copy; ``[rows, 0]`` where there are none.

    Adding or taking rows of a matrix is several times slower at 1e6 rows.
    """
    count = matrices[0].shape[1]
    if count == 1:
        return function(*(matrix.squeeze(1) for matrix in matrices)).unsqueeze(1)
    if count == 0:
        return matrices[0].new_zeros(rows, 0)
    columns = zip(*(matrix.unbind(1) for matrix in matrices), strict=True)
    return torch.stack([function(*one) for one in columns], dim=1)


@dataclass(frozen=True, slots=True)
class GroupMoments:
    """Statistics of each group, all ``[g, r]``; the properties lay them back at the sequences, ``[n, r]``.

    Attributes:
        counts: Scored members.
        means: Their mean (0 without any); exactly the value of one of them where all are equal.
        m2s: Their summed squared deviation.
        constants: Whether all scored members are equal, rounding aside, or fewer than two are scored.
        deviation: ``[n, r]``, each scored member minus its group's mean, 0 elsewhere.
        index: Group of each sequence, ``[n]``.
    """

    counts: Tensor
    means: Tensor
    m2s: Tensor
    constants: Tensor
    deviation: Tensor
    index: Tensor

    @property
    def count(self) -> Tensor:
        """`counts` at the sequences."""
        return self.at_sequences(self.counts)

    @property
    def mean(self) -> Tensor:
        """`means` at the sequences."""
        return self.at_sequences(self.means)

    @property
    def m2(self) -> Tensor:
        """`m2s` at the sequences."""
        return self.at_sequences(self.m2s)

    @property
    def constant(self) -> Tensor:
        """`constants` at the sequences."""
        return self.at_sequences(self.constants)

    def at_sequences(self, per_group: Tensor) -> Tensor:
        """Something about groups ``[g, r]``, at each sequence ``[n, r]``."""
        return _at(per_group, self.index)

    def std(self, ddof: int) -> Tensor:
        """Standard deviation of each group, ``[g, r]``, 0 where fewer than ``ddof + 1`` members are scored."""
        return (self.m2s / (self.counts - ddof).clamp_min(1.0)).sqrt()


def _at(per_group: Tensor, index: Tensor) -> Tensor:
    return _by_column(lambda column: column.index_select(0, index), index.numel(), per_group)


def group_moments(
    values: Tensor, scored: Tensor, groups: Groups, tolerance: Tensor | None = None
) -> GroupMoments:
    """Count, mean and spread of every column within every group.

    Args:
        values: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``; unscored cells are left out whatever they hold.
        groups: The prompt groups.
        tolerance: Largest difference within a group that is none, ``[g, r]`` (`RewardSum.tolerance`); None compares
            exactly. Infinities equal nothing: they stay visible.
    """
    counts = group_sum(scored.to(values.dtype), groups)
    means = group_sum(select(values, scored), groups) / counts.clamp_min(1.0)
    low, high = group_extremes(values, scored, groups)
    constants = high - low <= (0.0 if tolerance is None else tolerance)
    means = torch.where(constants & (counts > 0), low, means)
    spread = scored & ~_at(constants, groups.index)
    deviation = select(values - _at(means, groups.index), spread)
    m2s = group_sum(deviation.square(), groups)
    return GroupMoments(counts, means, m2s, constants, deviation, groups.index)


def group_any(flags: Tensor, groups: Groups) -> Tensor:
    """Whether any member of a sequence's group has the flag, bool ``[n]``.

    Args:
        flags: Bool ``[n]``.
        groups: The prompt groups.
    """
    return (group_sum(flags.double().unsqueeze(1), groups) > 0).squeeze(1)[groups.index]


def others_constant(
    values: Tensor, scored: Tensor, groups: Groups, tolerance: Tensor | None = None
) -> Tensor:
    """Whether the other scored members of a sequence's group are equal, rounding aside, or fewer than two.

    Args:
        values: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``.
        groups: The prompt groups.
        tolerance: As for `group_moments`.

    Returns:
        Bool ``[n, r]``; without meaning in an unscored cell.
    """
    low, high = (edge[groups.index] for edge in group_extremes(values, scored, groups))
    near = torch.zeros_like(low) if tolerance is None else tolerance[groups.index]
    at_low, at_high = scored & (values - low <= near), scored & (high - values <= near)
    count, lows, highs = (
        group_sum(flag.to(values.dtype), groups)[groups.index] for flag in (scored, at_low, at_high)
    )
    # All but this one are equal if it stands alone at one end and all others (of two, the one) at the other.
    alone = (at_low & (lows == 1) & (highs == count - 1)) | (at_high & (highs == 1) & (lows == count - 1))
    return (high - low <= near) | alone


def others_m2(
    values: Tensor, scored: Tensor, groups: Groups, moments: GroupMoments, tolerance: Tensor | None = None
) -> Tensor:
    """Squared deviations of the *other* scored members of a sequence's group from their own mean, summed.

    Of c members, ``m2 − d²·c/(c − 1)`` is the sum without the one that deviates by d. The member farthest from the mean
    stays among the others of everybody else, so theirs is at least a quarter of ``m2`` (``1 + c/(c − 2)`` ≤ 4 times it
    makes up m2) and the difference is as good as m2. Only the farthest itself may be nearly all of m2: where it is left
    out, the others are summed anew.

    Args:
        values: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``.
        groups: The prompt groups.
        moments: Those of the same values.
        tolerance: As for `group_moments`.

    Returns:
        ``[n, r]``; without meaning in an unscored cell.
    """
    share = moments.count / (moments.count - 1.0).clamp_min(1.0)
    downdated = (moments.m2 - moments.deviation.square() * share).clamp_min(0.0)
    farthest = _farthest(moments.deviation.abs(), scored, groups)
    return torch.where(farthest, group_moments(values, scored & ~farthest, groups, tolerance).m2, downdated)


def _farthest(distance: Tensor, scored: Tensor, groups: Groups) -> Tensor:
    """The one scored member of each group with the largest distance, the first of several; bool ``[n, r]``."""
    rows = torch.arange(groups.index.numel(), device=distance.device)

    def one(far: Tensor, known: Tensor) -> Tensor:
        most = far.new_full((groups.count,), -1.0).scatter_reduce_(
            0, groups.index, torch.where(known, far, -1.0), "amax"
        )
        place = torch.where(known & (far == most[groups.index]), rows, rows.numel())
        first = rows.new_full((groups.count,), rows.numel()).scatter_reduce_(0, groups.index, place, "amin")
        return rows == first[groups.index]

    return _by_column(one, rows.numel(), distance, scored).to(torch.bool)


def group_extremes(values: Tensor, counted: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Lowest and highest counted value of each group, ``[g, r]`` in the precision given; +∞ and −∞ where none is.

    Args:
        values: ``[n, r]``.
        counted: Bool ``[n, r]``.
        groups: Of prompts, or of sessions.
    """

    def edge(worst: float, how: str) -> Tensor:
        return _by_column(
            lambda column: column.new_full((groups.count,), worst).scatter_reduce_(
                0, groups.index, column, how
            ),
            groups.count,
            select(values, counted, worst),
        )

    return edge(torch.inf, "amin"), edge(-torch.inf, "amax")


def group_largest(sizes: Tensor, counted: Tensor, groups: Groups) -> Tensor:
    """Largest counted size ≥ 0 of each group, ``[g, r]``; 0 where none is counted.

    Args:
        sizes: ``[n, r]``, none negative.
        counted: Bool ``[n, r]``.
        groups: The prompt groups.
    """
    return _by_column(
        lambda column: column.new_zeros(groups.count).scatter_reduce_(0, groups.index, column, "amax"),
        groups.count,
        select(sizes, counted),
    )


def check_singletons(rollouts: Rollouts, reader: str, on_singleton: str) -> None:
    """Refuse a group of one completion unless the caller asked for exact zeros.

    A group whose members exist but are unscored is another matter: it gives zeros and is counted
    in ``reward/unscored_fraction``. Dummies (`Rollouts.genuine`) are no members.

    Raises:
        CapabilityError: If a prompt has one completion and ``on_singleton`` is ``"error"``.
    """
    check_choice("on_singleton", on_singleton, ("error", "zero"))
    if on_singleton == "error" and 0 < rollouts.groups.smallest < 2:
        groups = rollouts.groups
        alone, count = groups.ids[groups.sizes == 1].tolist(), int((groups.sizes > 0).sum())
        shown = ", ".join(map(str, alone[:5])) + (", …" if len(alone) > 5 else "")
        raise CapabilityError(
            f"{reader} compares completions of one prompt, but {len(alone):,} of "
            f"{count:,} groups have a single completion (group_ids {shown}). "
            'Sample at least 2 per prompt, drop those groups, or set on_singleton="zero".'
        )
