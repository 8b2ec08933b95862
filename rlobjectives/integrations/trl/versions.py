"""Which versions of TRL are supported, checked once at import."""

from __future__ import annotations

import re
from importlib import metadata

from rlobjectives.errors import RLObjectivesError
from rlobjectives.integrations.extras import need

__all__ = [
    "BROKEN",
    "FIRST",
    "NEXT",
    "RANGE",
    "UnsupportedVersionError",
    "check_version",
    "installed_version",
]

FIRST = (1, 0)
"""First supported version."""
NEXT = (1, 17)
"""First version that has not been tested; it may rename the private methods this adapter overrides."""
BROKEN = ((1, 15, 0),)
"""Versions in between that fail by themselves (1.15.0 cannot be imported without Triton)."""

RANGE = "trl>=1.0,!=1.15.0,<1.17"
"""All of it, as pip writes it."""


class UnsupportedVersionError(RLObjectivesError, ImportError):
    """The installed TRL is too old, too new, or known to be broken."""


def installed_version() -> str:
    """Version of the installed TRL.

    Raises:
        MissingExtraError: If it is not installed.
    """
    need("rlobjectives.integrations.trl", "trl", "trl")
    return metadata.version("trl")


def check_version(version: str) -> None:
    """Raise unless a version of TRL is supported.

    Args:
        version: Such as ``"1.16.0"``; whatever follows the numbers (``.dev0``, ``rc1``) is ignored.

    Raises:
        UnsupportedVersionError: Naming the version, the range and what to install.

    Example:
        >>> check_version("1.16.0")
        >>> check_version("1.15.0")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        rlobjectives.integrations.trl.versions.UnsupportedVersionError: TRL 1.15.0 is not supported: ...
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    numbers += (0,) * (3 - len(numbers))
    if numbers in BROKEN:
        reason = "that release fails without Triton; the one before and the one after do not"
    elif numbers < FIRST:
        reason = "its trainers lack the hooks this adapter overrides"
    elif numbers[:2] >= NEXT:
        reason = "it is newer than any version this adapter was tested with, and it overrides private methods"
    else:
        return
    raise UnsupportedVersionError(
        f"TRL {version} is not supported: {reason}. Supported: {RANGE}. Run: pip install '{RANGE}'."
    )
