"""Errors of one rank that all of them raise, so that nobody waits for a rank that has stopped."""

from __future__ import annotations

from typing import TypeVar

from accelerate.utils import gather_object

from rlobjectives.errors import CapabilityError

__all__ = ["raise_together", "said_by_ranks"]

T = TypeVar("T")


def said_by_ranks(mine: T) -> list[T]:
    """What each rank has to say, by rank. All ranks call it together.

    Args:
        mine: Plain data.
    """
    found: list[T] = gather_object([mine])
    return found


def raise_together(sentence: str | None) -> None:
    """Raise on all ranks if any has an objection. All ranks call it together.

    Args:
        sentence: What is wrong here, or None.

    Raises:
        CapabilityError: With the sentence of the first rank that has one.
    """
    everywhere = said_by_ranks(sentence)
    for rank, said in enumerate(everywhere):
        if said:
            several = len(everywhere) > 1
            where, tail = (
                (f"rank {rank}: ", f" Raised on all {len(everywhere)} ranks.") if several else ("", "")
            )
            raise CapabilityError(f"{where}{said}{tail}")
