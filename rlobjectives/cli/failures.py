"""Which errors of a run end in one message, and which keep their traceback."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

import rlobjectives
from rlobjectives.cli.messages import readable, shortened
from rlobjectives.errors import (
    CapabilityError,
    MissingColumnError,
    RLObjectivesError,
    UnknownAlgorithmError,
)

__all__ = ["DEBUG", "ConfigurationError", "one_message", "reported"]

DEBUG = "RLOBJECTIVES_DEBUG"
"""Environment variable: set to 1, every error keeps its traceback."""
_OURS = (RLObjectivesError, MisconfigurationException)
_CLEAR = (ValueError, TypeError, ImportError)  # raised on purpose, with a sentence
_WRONG_OPTIONS = (CapabilityError, MissingColumnError, UnknownAlgorithmError, MisconfigurationException)


class ConfigurationError(RLObjectivesError, ValueError):
    """The configuration of a run is wrong; nothing was started."""


@contextlib.contextmanager
def one_message(place: str = "") -> Iterator[None]:
    """Turn what goes wrong while a configuration is read and its classes are built into a `ConfigurationError`.

    An error that passes through a user's own code stays as it is: its traceback shows where.

    Args:
        place: Key of the configuration that the message starts with.

    Raises:
        ConfigurationError: With the message of this library's error, or of the parser, in one piece.

    Example:
        >>> with one_message("trainer"):
        ...     raise CapabilityError("devices is 0; expected 1 or more.")
        Traceback (most recent call last):
        ...
        rlobjectives.cli.failures.ConfigurationError: trainer: devices is 0; expected 1 or more.
    """
    prefix = f"{place}: " if place else ""
    try:
        yield
    except ConfigurationError:
        raise
    except ArgumentError as error:
        raise ConfigurationError(readable(str(error))) from error
    except Exception as error:
        # jsonargparse raises errors of its own from those of a constructor.
        for cause in _chain(error):
            if isinstance(cause, _OURS):
                raise ConfigurationError(shortened(f"{prefix}{cause}")) from error
        # Without this function and the place of the `with` itself, where every traceback begins.
        frames = [frame for one in [*_chain(error)][1:] for frame in _frames(one)]
        # Where several classes were tried, the parser itself speaks, and only its text holds what they raised.
        frames += [] if str(error).startswith("Does not validate against any") else _frames(error)[2:]
        if any(_is_own(frame.filename) for frame in frames):
            raise
        for cause in _chain(error):
            if isinstance(cause, OSError):
                raise ConfigurationError(shortened(f"{prefix}{cause}")) from error
        if isinstance(error, UnicodeDecodeError):
            raise ConfigurationError(f"{prefix}the file is not UTF-8: {error}.") from error
        if isinstance(error, OverflowError):  # the parser makes floats of whole numbers
            raise ConfigurationError(f"{prefix}{readable(str(error))}") from error
        kind = "" if isinstance(error, _CLEAR) else f"{type(error).__name__}: "
        raise ConfigurationError(
            f"{prefix}{kind}{readable(str(error))} ({DEBUG}=1 shows the traceback)"
        ) from error


def reported(error: Exception) -> int | None:
    """Print the message of an error that needs no traceback.

    Args:
        error: What a command raised.

    Returns:
        The exit status: 2 for a wrong configuration, 1 for what this library found wrong in a run. None, and nothing
        is printed, for any other error, and for all of them where `DEBUG` is set.
    """
    if os.environ.get(DEBUG, "0") not in ("", "0") or not isinstance(error, _OURS):
        return None
    print(f"rlobjectives: error: {shortened(str(error))}", file=sys.stderr)
    return 2 if isinstance(error, (ConfigurationError, *_WRONG_OPTIONS)) else 1


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it, as far as a traceback shows it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _is_own(filename: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor this package's."""
    if filename.startswith("<"):
        return False
    path = Path(filename)
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    roots: list[str | Path] = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(rlobjectives.__file__).parent),
    ]
    return not installed and not any(path.is_relative_to(root) for root in roots)
