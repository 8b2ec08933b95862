"""A rank that cannot go on tells the others why, so that none of them waits for it."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.faults import STOPPING, in_words, is_told, told
from rlobjectives.errors import RankError

__all__ = ["ends_together", "is_lost", "meet", "tell", "translated", "watched"]

_POLL_SECONDS = 0.25
_PATIENCE_SECONDS = 4.0
"""How long a rank that waits in a collective has, once it is known to wait in vain, to come out by itself."""
_LINGER_SECONDS = 3.0
"""How long a rank that stops waits for the others to have read why: the words may be kept in its own process."""
_LOST = re.compile(r"\b(gloo|nccl\w*|processgroup\w*)\b", re.IGNORECASE)
"""What gloo and NCCL put into their messages: a lost connection alone may be one to a sandbox or a reward server."""


class _Alarm:
    """The words of the first rank that stopped, in the store through which the ranks met.

    Args:
        store: Of the default process group.
        rank: This rank.
        ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        # What ended one run of a process says nothing about the next, such as another ``fit`` after a refusal.
        self._cause, self._rung, self._known = (
            f"rlobjectives/{_runs}/{name}" for name in ("cause", "rung", "known")
        )
        self.cause: tuple[int, str] | None = None

    @classmethod
    def of_run(cls) -> _Alarm | None:
        """That of all ranks of the run; None in a single process."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), dist.get_world_size())

    def ring(self, text: str, *, gone: int = 0) -> None:
        """Tell the others, unless one of them was first, and give them time to hear it; not those that are gone."""
        try:
            if self.store.add(self._rung, 1) == 1:
                self.cause = (self.rank, text)
                self.store.set(self._cause, f"{self.rank} {text}")
            known, deadline = self.store.add(self._known, 1), time.monotonic() + _LINGER_SECONDS
            while known < self.ranks - gone and time.monotonic() < deadline:
                time.sleep(0.02)
                known = self.store.add(self._known, 0)
        except RuntimeError:  # whoever kept the store is gone: there is nobody left to tell through it
            return

    def heard(self, seconds: float = 0.0) -> tuple[int, str] | None:
        """Who stopped first and why; None if nobody has said so within some seconds."""
        deadline = time.monotonic() + seconds
        while self.cause is None:
            try:
                if self.store.check([self._cause]):
                    rank, _, text = self.store.get(self._cause).decode(errors="replace").partition(" ")
                    self.cause = (int(rank), text)
                    self.store.add(self._known, 1)
            except RuntimeError:  # as above
                return self.cause
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return self.cause

    def of_another(self, seconds: float = 0.0) -> RankError | None:
        """The error to raise here if another rank has stopped."""
        cause = self.heard(seconds)
        if cause is None or cause[0] == self.rank:
            return None
        error = RankError(f"rank {cause[0]} stopped with {cause[1]} — this rank waited for it and stops too.")
        told(error)
        return error


class _Watch(threading.Thread):
    """Listens for the alarm while the rank's own thread may be waiting for a rank that will not come."""

    def __init__(self, alarm: _Alarm) -> None:
        super().__init__(name="rlobjectives-watch", daemon=True)
        self.alarm, self.done = alarm, threading.Event()

    def run(self) -> None:
        while not self.done.wait(_POLL_SECONDS):
            error = self.alarm.of_another()
            if error is not None and not self.done.wait(_PATIENCE_SECONDS):
                # No collective can be called off from outside, and it may wait for the group's time-out, half an hour.
                print(f"RankError on rank {self.alarm.rank}: {error}", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(1)
            if error is not None or self.alarm.cause is not None:
                return


_watch: _Watch | None = None
_runs = _meetings = 0


@contextmanager
def watched(*, new_run: bool = False) -> Iterator[_Alarm | None]:
    """Let no collective inside wait for a rank that has told why it stopped: this process ends seconds later.

    Args:
        new_run: What was told before is forgotten; all ranks say so at the same point of their program.

    Yields:
        What the ranks tell each other through; None in a single process.
    """
    global _runs, _watch
    _runs += new_run
    if _watch is not None:  # inside another one
        yield _watch.alarm
        return
    alarm = _Alarm.of_run()
    if alarm is None:
        yield None
        return
    _watch = watch = _Watch(alarm)
    watch.start()
    try:
        yield alarm
    finally:
        watch.done.set()
        _watch = None
        # One that still asks the store when Python ends would abort the process.
        watch.join(_LINGER_SECONDS)


@contextmanager
def ends_together(communicator: Communicator | None = None) -> Iterator[None]:
    """Run code with collectives inside; an exception on one rank ends all of them within seconds, with its words.

    For forwards and backwards under DDP, FSDP or ZeRO, for reward functions before a gather, for a whole training
    loop. Whoever fails raises its own exception, after telling the others through the store they met in. The others
    raise `RankError` with kind and text of it as soon as they come out of the collective in which they wait for it, which
    they do when the failed process ends. If it does not end, collectives would wait for the time-out of their
    process group: such a rank prints the error and leaves with exit code 1.

    Nobody can go on after that, so use `raised_together` for code without collectives. Costs nothing but a thread that
    asks the store four times a second.

    Args:
        communicator: One of a single process makes this do nothing; by default, and otherwise, all ranks of the run.

    Returns:
        A context manager.

    Raises:
        RankError: If another rank has stopped, or is gone without a word.

    Example:
        >>> from rlobjectives.distributed import LOCAL
        >>> with ends_together(LOCAL):
        ...     int("seven")
        Traceback (most recent call last):
        ...
        ValueError: invalid literal for int() with base 10: 'seven'
    """
    if communicator is not None and communicator.group is None:
        yield
        return
    with watched() as alarm:
        try:
            yield
        except STOPPING as error:
            instead = tell(error, alarm)
            if instead is not None:
                raise instead from error
            raise
        if alarm is not None and alarm.cause is not None:
            other = alarm.of_another()
            if other is not None:
                raise other


def tell(error: BaseException, alarm: _Alarm | None = None) -> RankError | None:
    """Tell the other ranks of an error that ends this one, if they do not know it.

    Args:
        error: What ended this rank.
        alarm: What the ranks tell each other through.

    Returns:
        What to raise instead, where the error is only that another rank is gone.
    """
    alarm = alarm or _Alarm.of_run()
    if alarm is None or is_told(error):
        return None
    if not is_lost(error):
        alarm.ring(in_words(error))
        told(error)
        return None
    other = alarm.of_another(seconds=2.0)
    if other is None:
        other = RankError(
            f"another rank is gone without a word (killed, or out of memory?): {in_words(error)} Its own log, and "
            "the kernel's, may say more."
        )
        alarm.ring(in_words(other), gone=1)
        told(other)
    return other


def meet(error: BaseException | None) -> None:
    """Come out of code with collectives inside, before an exchange; all ranks of the run call it together.

    A rank that failed in such code must not go into the exchange while others are still in there: their collectives
    would take its message for one of theirs, at which gloo ends a process without a word. So it waits until all have come
    out, for a few seconds; else it tells them why it stops, and does not meet them again.

    Args:
        error: What went wrong here; raised if the others do not come.
    """
    global _meetings
    alarm = _Alarm.of_run()
    if alarm is None:
        return
    _meetings += 1
    key, deadline = f"rlobjectives/meeting/{_meetings}", time.monotonic() + _LINGER_SECONDS
    try:
        here = alarm.store.add(key, 1)
        while error is not None and here < alarm.ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            here = alarm.store.add(key, 0)
    except RuntimeError:  # whoever kept the store is gone: the exchange will say so
        here = 0
    if error is not None and here < alarm.ranks:
        raise tell(error, alarm) or error


@contextmanager
def translated(communicator: Communicator) -> Iterator[None]:
    """Raise the words of a rank that stopped in place of those of a lost connection, and do not wait for it.

    Args:
        communicator: Of the exchange inside.
    """
    if communicator.group is None:
        yield
        return
    with watched() as alarm:
        try:
            yield
        except RuntimeError as error:
            other = alarm.of_another(seconds=1.0) if alarm is not None and is_lost(error) else None
            if other is not None:
                raise other from error
            raise


def is_lost(error: BaseException) -> bool:
    """Whether this is how a collective says that another rank is gone."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
