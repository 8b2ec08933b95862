"""`check_part`: every law that applies to a part, and a report with the smallest example of each failure."""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlobjectives.checks import check_choice
from rlobjectives.testing.compare import LawError
from rlobjectives.testing.examples import Dice, Example, draw, smallest
from rlobjectives.testing.laws import LAWS, METRIC_LAWS, Law
from rlobjectives.testing.subject import Subject, subject_of

__all__ = ["Finding", "Report", "check_part"]


@dataclass(frozen=True)
class Finding:
    """What one law says about a part.

    Attributes:
        law: Its name.
        promise: What it promises, in one line.
        exempt: Why it was not tried; empty if it was.
        error: What broke it; None if nothing did.
        example: The smallest example found that breaks it.
    """

    law: str
    promise: str
    exempt: str = ""
    error: Exception | None = None
    example: Example | None = None

    @property
    def verdict(self) -> str:
        """``"holds"``, ``"FAILS"``, or ``"–"`` where it was not tried."""
        return "FAILS" if self.error is not None else "–" if self.exempt else "holds"

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.law}: {self.exempt or self.promise}"
        kind = "" if isinstance(self.error, LawError) else f"{type(self.error).__name__}: "
        lines = [f"{self.law}: {self.promise}.", f"  {kind}{self.error}"]
        if self.example is not None:
            lines += [
                "  Smallest example found:",
                f"    example = {self.example!r}",
                f'    check_part(part, laws=["{self.law}"], example=example).raise_if_failed()',
                f"  which is {self.example.draw()!r}",
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What every law says about a part. Printed, it is a table, with the failures below.

    Attributes:
        part: What was checked.
        findings: One per law, in order.
    """

    part: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The laws that do not hold."""
        return tuple(one for one in self.findings if one.error is not None)

    def raise_if_failed(self) -> None:
        """Raise a `LawError` with the report unless every law holds."""
        if self.failed:
            raise LawError(str(self)) from self.failed[0].error

    def __str__(self) -> str:
        tried = [one for one in self.findings if not one.exempt]
        head = f"{self.part}: {len(tried) - len(self.failed)} of {len(tried)} laws hold"
        width = max(len(one.law) for one in self.findings)
        rows = [
            f"  {one.law:<{width}}  {one.verdict:<5}  {one.exempt or one.promise}" for one in self.findings
        ]
        return "\n\n".join(["\n".join([head, *rows]), *map(str, self.failed)])


def check_part(
    part: Any,
    *,
    laws: Collection[str] = (),
    example: Example | None = None,
    seed: int = 0,
    effort: int = 1,
) -> Report:
    """Try every law of this library that applies on a part of one's own. A second or two.

    A window of random sequences, ragged and with holes in their masks, runs through the part on one rank and in one
    piece, and then cut over micro-batches and ranks, padded and packed, with NaN where nothing counts, with dropped
    sequences …: the numbers must be the same. Its slope is compared with differences of its value; what it declares
    (columns, options, `Capabilities`, attributes such as ``straight_through``) with what it does.

    Args:
        part: An instance of an estimator, policy loss, reduction, correction or any other part; an `Objective`, all of
            whose parts are checked; a function ``(Rollouts) -> advantages``, or one that gives statistics by name.
        laws: Names of those to try; by default all.
        example: Try this one only, such as a report has printed.
        seed: Of the examples.
        effort: How many times more of them.

    Returns:
        What every law says; ``print`` it, or end a test with `Report.raise_if_failed`.

    Raises:
        CapabilityError: If it is no part, or there is no law of that name.

    Example:
        >>> from rlobjectives import ClippedSurrogate
        >>> report = check_part(ClippedSurrogate(clip_high=0.28), laws=["partition", "slope"])
        >>> print(report)
        ClippedSurrogate(clip_high=0.28): 2 of 2 laws hold
          partition  holds  any micro-batches on any ranks give the numbers of one batch
          slope      holds  the slope is the derivative of the value
        >>> report.raise_if_failed()
    """
    subject = subject_of(part)
    known = METRIC_LAWS if subject.metric is not None else LAWS
    for name in laws:
        check_choice("A name in laws", name, tuple(law.name for law in known))
    findings: list[Finding] = []
    with _quiet():
        for law in known:
            if laws and law.name not in laws:
                continue
            broken = next((one for one in findings if one.law == "runs" and one.error is not None), None)
            exempt = "no window runs" if broken else law.exempt(subject)
            if exempt:
                findings.append(Finding(law.name, law.promise, exempt))
            else:
                tried = [example] if example else list(_drawn(law, subject, seed, effort))
                findings.append(_tried(law, subject, tried, shrink=example is None))
    return Report(subject.name, tuple(findings))


def _drawn(law: Law, subject: Subject, seed: int, effort: int) -> Iterator[Example]:
    contexts = law.contexts if subject.objective.capabilities.supports_context_parallel else (1,)
    for turn, given in enumerate(law.draws * effort):
        dice = Dice(zlib.crc32(f"{law.name} {seed} {turn}".encode()))
        yield draw(dice, given, contexts)


def _tried(law: Law, subject: Subject, examples: list[Example], shrink: bool) -> Finding:
    for example in examples:
        error = _error(law, subject, example)
        if error is None:
            continue
        if shrink:
            kind = type(error)

            def fails(other: Example, kind: type = kind) -> bool:
                legible = law.round_numbers or other.digits is None
                return legible and type(_error(law, subject, other)) is kind

            example = smallest(example, fails, subject.fewest)
            error = _error(law, subject, example) or error
        return Finding(law.name, law.promise, error=error, example=example)
    return Finding(law.name, law.promise)


def _error(law: Law, subject: Subject, example: Example) -> Exception | None:
    try:
        law.holds(subject, example)
    except Exception as error:  # noqa: BLE001  # whatever a part raises breaks the law
        return error
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of tiny windows and the log of errors that are provoked here."""
    log = logging.getLogger("rlobjectives")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fewer than two that count")
            yield
    finally:
        log.disabled = before
