"""What went wrong on one rank, kept until all of them can raise it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlobjectives.columns import COLUMNS, LOGPROBS
from rlobjectives.distributed.communicator import Communicator

__all__ = ["ABOVE", "FIELDS", "STOPPING", "Fault", "in_words", "is_told", "told", "told_by"]

ABOVE = " above 0"
"""Ends the name of a field that counts log-probabilities above 0."""

FIELDS = (
    "estimate",
    "weights",
    "loss",
    "slope",
    "statistics",
    *COLUMNS,
    *(f"slope in {name}" for name, one in COLUMNS.items() if one.gradient),
    *(f"{name}{ABOVE}" for name in LOGPROBS),
)
"""Columns a value that may not be can be reported in; travels as a position in this tuple and `Fault.columns`."""

STOPPING = (Exception, KeyboardInterrupt, SystemExit)
"""What ends a rank's work: errors, an interrupt from the keyboard, and ``sys.exit``."""

_LONGEST_TEXT = 4000


@dataclass(slots=True)
class Fault:
    """What went wrong on this rank before the exchange; raised on all ranks at its end.

    Attributes:
        error: An exception of this rank, if any; ``KeyboardInterrupt`` and ``SystemExit`` included.
        counts: Entries that may not be (not finite, or a log-probability above 0) and all counted entries, by
            ``(micro_batch, field)``: 0-d tensors, so that nobody has to look at them before the message.
        columns: A user's own columns, the same on every rank: a field each, and one for a slope in it.
    """

    error: BaseException | None = None
    counts: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields, in the order that their positions refer to."""
        return (*FIELDS, *self.columns, *(f"slope in {name}" for name in self.columns))

    def note(self, error: BaseException) -> None:
        """Keep the first exception."""
        if self.error is None:
            self.error = error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run code of this rank; the first exception is kept, and raised by the exchange on all ranks together."""
        try:
            yield
        except STOPPING as error:  # kept, never dropped
            self.note(error)

    def header(self, device: torch.device) -> Tensor:
        """``[code, micro-batch, bad, total]``, float64; code -1 is an exception."""
        if self.error is not None:
            return torch.tensor([-1.0, 0.0, 0.0, 0.0], dtype=torch.float64, device=device)
        if not self.counts:
            return torch.zeros(4, dtype=torch.float64, device=device)
        fields = self.fields
        places = torch.tensor(
            [(fields.index(name) + 1, micro_batch) for micro_batch, name in self.counts],
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


def in_words(error: BaseException) -> str:
    """Kind and text of an exception.

    Example:
        >>> in_words(ValueError("no verifier here")), in_words(KeyboardInterrupt())
        ('ValueError: no verifier here', 'KeyboardInterrupt')
    """
    # What UTF-8 does not hold, such as half of a surrogate pair from a broken tokenizer, must not stop the message.
    text = str(error).strip().encode("utf-8", "backslashreplace").decode()
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def told(error: BaseException) -> BaseException:
    """Note that all other ranks of the run know of an error, or raise it themselves at the same point.

    Args:
        error: About to be raised.
    """
    error._rlobjectives_told = True  # type: ignore[attr-defined]
    return error


def told_by(error: BaseException, communicator: Communicator) -> BaseException:
    """`told`, of an error that all ranks of a communicator raise, if those are all ranks of the run.

    Ranks outside, who may wait in an exchange around this one, have heard nothing yet.

    Args:
        error: About to be raised.
        communicator: Of the exchange that it comes from.
    """
    return told(error) if communicator.covers_run else error


def is_told(error: BaseException) -> bool:
    """Whether all other ranks of the run know of an error already."""
    return bool(getattr(error, "_rlobjectives_told", False))
