"""When a window's statistics are exchanged: each after what it reads, in as few exchanges as that allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlobjectives.token_parts import Round, TokenPart

__all__ = ["Plan", "Turn", "plan"]


class Turn(NamedTuple):
    """One round of one part.

    Attributes:
        scope: The part's field.
        part: It.
        number: Of the round, from 0.
        round: What is measured.
    """

    scope: str
    part: TokenPart
    number: int
    round: Round


class Plan(NamedTuple):
    """What each exchange carries.

    Attributes:
        exchanges: The rounds of each; the first also carries what every window counts.
        kept: The exchange that also counts the tokens that stay in the loss; None where none are dropped from it.
    """

    exchanges: tuple[tuple[Turn, ...], ...]
    kept: int | None


def plan(parts: Mapping[str, TokenPart], *, estimator_waits: bool) -> Plan:
    """Put every round into the first exchange that is late enough.

    A round comes after the part's earlier ones; after the first exchange if it reads advantages that an estimator
    finishes with statistics of its own. Which tokens stay is known when the last part that drops any has all of its
    rounds.

    Args:
        parts: Those that read tokens, by field.
        estimator_waits: Whether the estimator has statistics of the window.
    """
    exchanges: list[list[Turn]] = [[]]
    done = {}
    for scope, part in parts.items():
        rounds = part.rounds()
        first = int(part.prepass_reads_advantages and estimator_waits)
        exchanges += [[] for _ in range(first + len(rounds) - len(exchanges))]
        for number, one in enumerate(rounds):
            exchanges[first + number].append(Turn(scope, part, number, one))
        done[scope] = first + len(rounds)
    kept = max((done[scope] for scope, part in parts.items() if part.shrinks_denominator), default=None)
    if kept is not None:
        exchanges += [[] for _ in range(kept + 1 - len(exchanges))]
    return Plan(tuple(map(tuple, exchanges)), kept)
