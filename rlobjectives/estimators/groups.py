"""Group statistics in float64: any ids, any sizes, interleaved, with missing cells.

Two passes (mean, then squared deviations), and "no spread" is decided on ``min == max``, never on
a standard deviation that rounding left near zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import check_choice
from rlobjectives.errors import CapabilityError
from rlobjectives.rollouts import Groups, Rollouts

__all__ = ["GroupMoments", "check_singletons", "group_any", "group_moments", "group_sum", "others_constant"]


def group_sum(values: Tensor, groups: Groups) -> Tensor:
    """Sum each column of ``[n, r]`` within its group.

    Returns:
        ``[g, r]``, in the order of ``groups.ids``.
    """
    # One dimension at a time: index_add over rows of a matrix is several times slower at 1e6 rows.
    columns = [
        values.new_zeros(groups.count).index_add_(0, groups.index, column) for column in values.unbind(1)
    ]
    return torch.stack(columns, dim=1) if columns else values.new_zeros(groups.count, 0)


@dataclass(frozen=True, slots=True)
class GroupMoments:
    """Statistics of each sequence's own group, laid back at the sequence: all ``[n, r]``.

    Attributes:
        count: Scored members.
        mean: Their mean (0 without any).
        m2: Their summed squared deviation.
        constant: Whether all scored members are exactly equal, or fewer than two are scored.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    constant: Tensor

    def std(self, ddof: int) -> Tensor:
        """Standard deviation, 0 where fewer than ``ddof + 1`` members are scored."""
        return (self.m2 / (self.count - ddof).clamp_min(1.0)).sqrt()


def group_moments(values: Tensor, scored: Tensor, groups: Groups) -> GroupMoments:
    """Count, mean and spread of every column within every group.

    Args:
        values: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``; unscored cells are left out whatever they hold.
        groups: The prompt groups.
    """
    index = groups.index
    kept = torch.where(scored, values, 0.0)
    count = group_sum(scored.to(values.dtype), groups)
    mean = (group_sum(kept, groups) / count.clamp_min(1.0))[index]
    squared = torch.where(scored, values - mean, 0.0).square()
    low, high = _extremes(values, scored, groups)
    constant = (low >= high) & ~torch.isinf(low + high)  # infinities are no constant: they stay visible
    return GroupMoments(count[index], mean, group_sum(squared, groups)[index], constant[index])


def group_any(flags: Tensor, groups: Groups) -> Tensor:
    """Whether any member of a sequence's group has the flag, bool ``[n]``.

    Args:
        flags: Bool ``[n]``.
        groups: The prompt groups.
    """
    counts = torch.zeros(groups.count, dtype=torch.float64, device=flags.device)
    return (counts.index_add_(0, groups.index, flags.double()) > 0)[groups.index]


def others_constant(values: Tensor, scored: Tensor, groups: Groups) -> Tensor:
    """Whether the other scored members of a sequence's group are exactly equal, or fewer than two.

    Args:
        values: Float64 ``[n, r]``.
        scored: Bool ``[n, r]``.
        groups: The prompt groups.

    Returns:
        Bool ``[n, r]``; without meaning in an unscored cell.
    """
    low, high = (edge[groups.index] for edge in _extremes(values, scored, groups))
    at_low, at_high = scored & (values == low), scored & (values == high)
    count, lows, highs = (
        group_sum(flag.to(values.dtype), groups)[groups.index] for flag in (scored, at_low, at_high)
    )
    # All but this one are equal if it stands alone at one end and all others stand at the other.
    alone = (at_low & (lows == 1) & (highs == count - 1)) | (at_high & (highs == 1) & (lows == count - 1))
    return (low >= high) | alone | (count <= 2)


def _extremes(values: Tensor, scored: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Lowest and highest scored value of each group, ``[g, r]``; +∞ and −∞ where none is."""
    index = groups.index.unsqueeze(1).expand_as(values)
    low, high = (
        values.new_full((groups.count, values.shape[1]), worst).scatter_reduce(
            0, index, torch.where(scored, values, worst), how
        )
        for worst, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    return low, high


def check_singletons(rollouts: Rollouts, reader: str, on_singleton: str) -> None:
    """Refuse a group of one completion unless the caller asked for exact zeros.

    A group whose members exist but are unscored is another matter: it gives zeros and is counted
    in ``reward/unscored_fraction``.

    Raises:
        CapabilityError: If a prompt has one completion and ``on_singleton`` is ``"error"``.
    """
    check_choice("on_singleton", on_singleton, ("error", "zero"))
    if on_singleton == "error" and 0 < rollouts.groups.smallest < 2:
        alone = rollouts.groups.ids[rollouts.groups.sizes == 1].tolist()
        shown = ", ".join(map(str, alone[:5])) + (", …" if len(alone) > 5 else "")
        raise CapabilityError(
            f"{reader} compares completions of one prompt, but {len(alone):,} of "
            f"{rollouts.groups.count:,} groups have a single completion (group_ids {shown}). "
            'Sample at least 2 per prompt, drop those groups, or set on_singleton="zero".'
        )
