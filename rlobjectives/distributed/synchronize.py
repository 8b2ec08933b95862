"""One message per rank: errors, schema, micro-batch count and statistics, folded in rank order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rlobjectives.checks import ABOVE_ZERO
from rlobjectives.distributed.agreement import checksum, joined, other_options
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.ending import meet, translated
from rlobjectives.distributed.faults import ABOVE, Fault, in_words, is_told, told_by
from rlobjectives.errors import NonFiniteError, RankError
from rlobjectives.statistics import Stat

__all__ = ["Exchange", "Fault", "check_agreement", "exchange", "raised_together", "synchronize"]

_FIND = "Find their source or mask those places; nothing is repaired silently."
_HEADER = 6
_FLOOR = 1024  # rows of ranks that disagree must have one length; eight kilobytes cost nothing
_OBJECTIVES = (
    "ranks hold different objectives, window statistics or columns of a rollout",
    "Every rank must build the same objective, with the same options and library version, and fill the same columns; "
    "name an attribute that may differ, such as a cache, in its class's may_differ.",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The outcome of one collective.

    Attributes:
        statistics: Merged over all ranks; bitwise equal on each.
        micro_batches: Largest number of micro-batches on any rank.
        counts: That of each rank, by position in the group.
    """

    statistics: dict[str, Stat]
    micro_batches: int
    counts: tuple[int, ...] = ()


def exchange(
    statistics: Mapping[str, Stat],
    communicator: Communicator,
    *,
    fault: Fault | None = None,
    micro_batches: int = 0,
    agreement: Mapping[str, object] | None = None,
    disagreement: tuple[str, str] = _OBJECTIVES,
) -> Exchange:
    """Merge statistics over all ranks in one collective, or raise on all of them together.

    Where ranks failed or disagree, all of them know it from that collective, and two more tell everybody why.

    Args:
        statistics: The same names and kinds on every rank; a rank without data gives identities.
        communicator: The ranks.
        fault: What went wrong here.
        micro_batches: How many this rank has.
        agreement: What else must be the same on every rank, such as the options of an objective, by name.
        disagreement: What is wrong and what to do if it is not.

    Returns:
        Merged statistics, on the device they came from.

    Raises:
        RankError: If another rank failed, or ranks hold different statistics or another `agreement`.
        NonFiniteError: If any rank counted a non-finite value.
    """
    kinds = sorted((name, type(stat)) for name, stat in statistics.items())
    fault = fault or Fault()
    if fault.error is not None and is_told(fault.error):
        raise fault.error  # by an exchange inside, on all ranks; or to others that may be in collectives of their own
    layout = "; ".join(f"{name}:{kind.__name__}:{kind.width}" for name, kind in kinds)
    terms = joined({**(agreement or {}), "window statistics": layout})
    home = next((stat.row.device for stat in statistics.values()), torch.device("cpu"))
    device = communicator.device or home
    body = [statistics[name].pack().to(device) for name, _ in kinds]
    tail = torch.tensor([checksum(terms), float(micro_batches)], dtype=torch.float64, device=device)
    row = torch.cat([fault.header(device), tail, *body])
    # Rows are padded to a common length, so that ranks that disagree can still tell each other.
    width = max(_FLOOR, 1 << (row.numel() - 1).bit_length())
    try:
        with translated(communicator):
            rows = communicator.gather(torch.nn.functional.pad(row, (0, width - row.numel())))
            headers = rows[:, :_HEADER].tolist()  # the host sync of an exchange
    except (RuntimeError, RankError) as other:
        if fault.error is not None:  # nobody else can say what happened here
            raise fault.error from other
        raise
    _raise_together(headers, communicator, fault, terms, disagreement)
    merged: dict[str, Stat] = {}
    start = _HEADER
    for name, kind in kinds:
        columns = rows[:, start : start + kind.width]
        folded = columns[0] if communicator.world_size == 1 else kind.fold_rows(columns)
        merged[name] = kind.unpack(folded.to(home))
        start += kind.width
    counts = tuple(int(header[5]) for header in headers)
    return Exchange(merged, max(counts), counts)


def synchronize(statistics: Mapping[str, Stat], communicator: Communicator | None = None) -> dict[str, Stat]:
    """Merge statistics over all ranks in one collective, bitwise equally on all of them.

    Args:
        statistics: The same names and kinds on every rank; a rank without data gives identities.
        communicator: The ranks; by default all of the run.

    Returns:
        The merged statistics, by name.

    Raises:
        RankError: If ranks hold different statistics.

    Example:
        >>> from rlobjectives.statistics import Sum
        >>> synchronize({"tokens": Sum.of(torch.ones(3))})
        {'tokens': Sum(3)}
    """
    return exchange(statistics, communicator or Communicator.world()).statistics


def check_agreement(
    options: Mapping[str, object], communicator: Communicator | None = None, *, fault: Fault | None = None
) -> None:
    """Raise on all ranks, in one exchange, unless options are the same on every rank.

    Call it at set-up with everything that must agree: learning rates, clipping, numbers of epochs and micro-batches,
    seeds, an objective. Ranks that differ in the first two end with different weights and equal metrics; in the others
    they wait for each other for ever.

    Args:
        options: By name: numbers, strings, containers of them, objects with such attributes, tensors, functions. The
            names may differ between ranks, too.
        communicator: The ranks; by default all of the run.
        fault: What went wrong before on this rank; raised here.

    Raises:
        RankError: Naming each option that differs, with all its values and the ranks that have them.

    Example:
        >>> check_agreement({"learning_rate": 1e-6, "epochs": 2})
    """
    exchange(
        {},
        communicator or Communicator.world(),
        fault=fault,
        agreement=options,
        disagreement=("ranks were given different options", "Give every rank the same."),
    )


@contextmanager
def raised_together(communicator: Communicator, *, collectives_inside: bool = False) -> Iterator[None]:
    """Run code that may fail on some ranks only; afterwards, in one collective, all of them go on or none.

    For what stands before a collective that this package does not see, such as the gathering of sharded weights.

    Args:
        communicator: The ranks that run it together.
        collectives_inside: The code has collectives of its own, in which other ranks may be when one fails. They must be all
            ranks of the run.

    Raises:
        Exception: What went wrong on this rank; on the others `RankError`, with kind and text of it.

    Example:
        >>> from rlobjectives.distributed import LOCAL
        >>> with raised_together(LOCAL):
        ...     int("seven")
        Traceback (most recent call last):
        ...
        ValueError: invalid literal for int() with base 10: 'seven'
    """
    fault = Fault()
    with fault.guard():
        yield
    if collectives_inside and communicator.world_size > 1:
        meet(fault.error)
    exchange({}, communicator, fault=fault)


def _raise_together(
    headers: list[list[float]],
    communicator: Communicator,
    fault: Fault,
    terms: str,
    disagreement: tuple[str, str],
) -> None:
    ranks = communicator.world_size
    everywhere = f" Raised on all {ranks} ranks." if ranks > 1 else ""
    failed = [position for position, header in enumerate(headers) if header[0] < 0]
    if failed:
        words = communicator.say("" if fault.error is None else in_words(fault.error))
        if fault.error is not None:
            raise told_by(fault.error, communicator)
        causes = "; ".join(
            f"rank {communicator.global_rank(position)} stopped with {_sentence(words[position])}"
            for position in failed
        )
        raise told_by(RankError(f"{causes} This rank stops at the same point.{everywhere}"), communicator)
    schemas: dict[float, list[int]] = {}
    for position, header in enumerate(headers):
        schemas.setdefault(header[4], []).append(communicator.global_rank(position))
    if len(schemas) > 1:
        parties = " / ".join(
            f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}" for members in schemas.values()
        )
        members = [communicator.global_rank(position) for position in range(len(headers))]
        found = "; ".join(other_options(communicator.say(terms), members))
        wrong, advice = disagreement
        raise told_by(RankError(f"{wrong} ({parties}): {found}. {advice}{everywhere}"), communicator)
    for position, (code, micro_batch, bad, total, *_) in enumerate(headers):
        if code > 0:
            name = fault.fields[int(code) - 1]
            what, remedy = "non-finite values", _FIND
            if name.endswith(ABOVE):
                name, what, remedy = name.removesuffix(ABOVE), "values above 0", ABOVE_ZERO
            error = NonFiniteError(
                f"rank {communicator.global_rank(position)}, micro-batch {int(micro_batch)}: {name} has "
                f"{int(bad):,} {what} among {int(total):,} that count. {remedy}{everywhere}"
            )
            raise told_by(error, communicator)


def _sentence(words: str) -> str:
    if not words:  # of a pipeline: a stage that failed without an exception differs from its last stage
        return "an objective that differs from its last stage's."
    return words if words.endswith((".", "!", "?")) else f"{words}."
