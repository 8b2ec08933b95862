"""Prompts in the order of an uninterrupted run, also in the second epoch of a run that was resumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

from torch.utils.data import Sampler

__all__ = ["ResumableSampler"]


class ResumableSampler(Sampler[Any]):
    """A sampler that shuffles anew in each epoch, and does so from the epoch in which a run goes on.

    TRL's sampler starts from its seed in each run, so that a run resumed in its second epoch would see the prompts in
    the order of the first once more.

    Args:
        sampler: TRL's.
        epochs: How many epochs are over; asked when the first of this run begins.

    Example:
        >>> import torch
        >>> shuffled = lambda: torch.utils.data.RandomSampler(range(5), generator=torch.Generator().manual_seed(0))
        >>> whole = ResumableSampler(shuffled(), lambda: 0)
        >>> epochs = [list(whole), list(whole)]
        >>> list(ResumableSampler(shuffled(), lambda: 1)) == epochs[1] != epochs[0]
        True
    """

    def __init__(self, sampler: Sampler[Any], epochs: Callable[[], int]) -> None:
        self.sampler = sampler
        self._epochs = epochs
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        """The indices of one epoch."""
        if not self._begun:
            self._begun = True
            for _ in range(self._epochs()):
                deque(self.sampler, maxlen=0)  # to its end: a sampler may draw at any place
        return iter(self.sampler)

    def __len__(self) -> int:
        """As many as TRL's sampler has."""
        return len(cast(Sized, self.sampler))
