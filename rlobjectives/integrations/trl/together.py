"""Errors of one rank that all of them raise, so that nobody waits for a rank that has stopped."""

from __future__ import annotations

from typing import TypeVar

from accelerate.utils import gather_object

from rlobjectives.distributed import Communicator, raised_together
from rlobjectives.distributed.ending import translated
from rlobjectives.errors import CapabilityError

__all__ = ["raise_together", "said_by_ranks"]

T = TypeVar("T")


def said_by_ranks(mine: T) -> list[T]:
    """What each rank has to say, by rank. All ranks call it together.

    Args:
        mine: Plain data.

    Raises:
        RankError: If another rank has stopped, with its words.
    """
    with translated(Communicator.world()):
        found: list[T] = gather_object([mine])
    return found


def raise_together(sentence: str | None) -> None:
    """Raise on all ranks if any has an objection. All ranks call it together.

    Args:
        sentence: What is wrong here, or None.

    Raises:
        CapabilityError: With this rank's sentence; on ranks without one `RankError`, with those of the others.
    """
    with raised_together(Communicator.world()):
        if sentence:
            raise CapabilityError(sentence)
