"""One message a rank: errors, schema, micro-batch count and statistics, folded in rank order."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlobjectives import errors
from rlobjectives.checks import ABOVE_ZERO, LOGPROBS
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.errors import NonFiniteError, RankError
from rlobjectives.statistics import Stat

__all__ = ["Exchange", "Fault", "exchange", "raised_together", "synchronize"]

ABOVE = " above 0"
"""Ends the name of a field that counts log-probabilities above 0."""

FIELDS = (
    "estimate",
    "logprobs",
    "old_logprobs",
    "advantages",
    "behavior_logprobs",
    "ref_logprobs",
    "entropy",
    "teacher_logprobs",
    "weights",
    "loss",
    "slope",
    "values",
    "old_values",
    "returns",
    "statistics",
    "behavior_kl",
    "teacher_divergence",
    "ref_kl",
    "slope in entropy",
    "slope in values",
    "slope in behavior_kl",
    "slope in ref_kl",
    "slope in teacher_divergence",
    *(f"{name}{ABOVE}" for name in LOGPROBS),
)
"""Columns a value that may not be can be reported in; travels as a position in this tuple."""

_FIND = "Find their source or mask those places; nothing is repaired silently."
_HEADER = 6
_FLOOR = 1024  # rows of ranks that disagree must have one length; eight kilobytes cost nothing
_KNOWN_ERRORS = tuple(sorted(name for name in errors.__all__))


@dataclass(slots=True)
class Fault:
    """What went wrong on this rank before the exchange; raised on all ranks at its end.

    Attributes:
        error: An exception of this rank, if any.
        counts: Entries that may not be (not finite, or a log-probability above 0) and all counted entries, by ``(micro_batch, field)``: 0-d tensors, so
            that nobody has to look at them before the message.
    """

    error: Exception | None = None
    counts: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, error: Exception) -> None:
        """Keep the first exception."""
        if self.error is None:
            self.error = error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run code of this rank; the first exception is kept, and raised by the exchange on all ranks together."""
        try:
            yield
        except Exception as error:  # kept, never dropped
            self.note(error)

    def header(self, device: torch.device) -> Tensor:
        """``[code, micro-batch, bad, total]``, float64."""
        if self.error is not None:
            kind = next(
                (base.__name__ for base in type(self.error).__mro__ if base.__name__ in _KNOWN_ERRORS),
                None,
            )
            code = -1.0 if kind is None else -2.0 - _KNOWN_ERRORS.index(kind)
            return torch.tensor([code, 0.0, 0.0, 0.0], dtype=torch.float64, device=device)
        if not self.counts:
            return torch.zeros(4, dtype=torch.float64, device=device)
        places = torch.tensor(
            [(FIELDS.index(name) + 1, micro_batch) for micro_batch, name in self.counts],
            dtype=torch.float64,
            device=device,
        )
        totals = torch.stack(
            [torch.stack([bad.double(), total.double()]).to(device) for bad, total in self.counts.values()]
        )
        rows = torch.cat([places, totals], dim=1)
        first = (totals[:, 0] > 0).to(torch.uint8).argmax(0, keepdim=True)
        row = rows.index_select(0, first).squeeze(0)
        return torch.where(row[2] > 0, row, 0.0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The outcome of one collective.

    Attributes:
        statistics: Merged over all ranks; bitwise equal on each.
        micro_batches: Largest number of micro-batches on any rank.
    """

    statistics: dict[str, Stat]
    micro_batches: int


def _schema(kinds: Sequence[tuple[str, type[Stat]]], agreement: str) -> float:
    text = agreement + ";".join(f"{name}:{kind.__name__}:{kind.width}" for name, kind in kinds)
    return float(zlib.crc32(text.encode()))


def exchange(
    statistics: Mapping[str, Stat],
    communicator: Communicator,
    *,
    fault: Fault | None = None,
    micro_batches: int = 0,
    agreement: str = "",
) -> Exchange:
    """Merge statistics over all ranks in one collective, or raise on all of them together.

    Args:
        statistics: The same names and kinds on every rank; a rank without data gives identities.
        communicator: The ranks.
        fault: What went wrong here.
        micro_batches: How many this rank has.
        agreement: What else must be the same on every rank, such as the options of an objective.

    Returns:
        Merged statistics, on the device they came from.

    Raises:
        RankError: If another rank failed, or ranks hold different statistics or another `agreement`.
        NonFiniteError: If any rank counted a non-finite value.
    """
    kinds = sorted((name, type(stat)) for name, stat in statistics.items())
    fault = fault or Fault()
    home = next((stat.row.device for stat in statistics.values()), torch.device("cpu"))
    device = communicator.device or home
    body = [statistics[name].pack().to(device) for name, _ in kinds]
    tail = torch.tensor([_schema(kinds, agreement), float(micro_batches)], dtype=torch.float64, device=device)
    row = torch.cat([fault.header(device), tail, *body])
    # Rows are padded to a common length, so that ranks that disagree can still tell each other.
    width = max(_FLOOR, 1 << (row.numel() - 1).bit_length())
    rows = communicator.gather(torch.nn.functional.pad(row, (0, width - row.numel())))
    headers = rows[:, :_HEADER].tolist()  # the one host sync
    _raise_together(headers, communicator, fault)
    merged: dict[str, Stat] = {}
    start = _HEADER
    for name, kind in kinds:
        columns = rows[:, start : start + kind.width]
        folded = columns[0] if communicator.world_size == 1 else kind.fold_rows(columns)
        merged[name] = kind.unpack(folded.to(home))
        start += kind.width
    return Exchange(merged, int(max(header[5] for header in headers)))


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


@contextmanager
def raised_together(communicator: Communicator) -> Iterator[None]:
    """Run code that may fail on some ranks only; afterwards, in one collective, all of them go on or none.

    For what stands before a collective that this package does not see, such as the gathering of sharded weights.

    Args:
        communicator: The ranks that run it together.

    Raises:
        Exception: What went wrong on this rank; `RankError` on the others.

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
    exchange({}, communicator, fault=fault)


def _raise_together(headers: list[list[float]], communicator: Communicator, fault: Fault) -> None:
    ranks = communicator.world_size
    everywhere = f" Raised on all {ranks} ranks." if ranks > 1 else ""
    failed = [position for position, header in enumerate(headers) if header[0] < 0]
    if failed:
        if fault.error is not None:
            raise fault.error
        code = headers[failed[0]][0]
        kind = "an exception" if code == -1.0 else _KNOWN_ERRORS[int(-2.0 - code)]
        names = ", ".join(str(communicator.global_rank(position)) for position in failed)
        raise RankError(
            f"rank {names} stopped with {kind} before this exchange; its own log has the message. "
            f"This rank stops at the same point.{everywhere}"
        )
    schemas: dict[float, list[int]] = {}
    for position, header in enumerate(headers):
        schemas.setdefault(header[4], []).append(communicator.global_rank(position))
    if len(schemas) > 1:
        parties = " / ".join(f"ranks {', '.join(map(str, members))}" for members in schemas.values())
        raise RankError(
            f"ranks hold different objectives, window statistics or columns of a rollout ({parties}). Every rank must "
            f"build the same objective, with the same options and library version, and fill the same columns.{everywhere}"
        )
    for position, (code, micro_batch, bad, total, *_) in enumerate(headers):
        if code > 0:
            name = FIELDS[int(code) - 1]
            what, remedy = "non-finite values", _FIND
            if name.endswith(ABOVE):
                name, what, remedy = name.removesuffix(ABOVE), "values above 0", ABOVE_ZERO
            raise NonFiniteError(
                f"rank {communicator.global_rank(position)}, micro-batch {int(micro_batch)}: {name} has "
                f"{int(bad):,} {what} among {int(total):,} that count. {remedy}{everywhere}"
            )
