"""What each extra of the package brings, and one message for what is missing of it."""

from __future__ import annotations

import importlib.util

from rlobjectives.errors import RLObjectivesError

__all__ = ["EXTRAS", "MissingExtraError", "need"]

EXTRAS: dict[str, tuple[str, ...]] = {
    "lightning": ("lightning", "jsonargparse", "transformers", "numpy"),
    "deepspeed": ("deepspeed",),
    "trl": ("trl", "transformers", "accelerate", "datasets", "numpy"),
}
"""Packages without which the adapters of an extra do not work, by their import names."""


class MissingExtraError(RLObjectivesError, ModuleNotFoundError):
    """A package is missing that one of this package's extras brings."""


def need(what: str, extra: str, *packages: str) -> None:
    """Raise unless the packages of an extra are there; nothing is imported.

    Args:
        what: Who needs them.
        extra: The extra that brings them, a key of `EXTRAS`.
        packages: Only these of it; by default all.

    Raises:
        MissingExtraError: Naming the packages and the command that installs them.

    Example:
        >>> need("this example", "lightning", "transformers")
        >>> need("this example", "lightning", "no_such_package")
        Traceback (most recent call last):
        ...
        rlobjectives.integrations.extras.MissingExtraError: this example needs no_such_package, which is not installed. Run: pip install "rlobjectives[lightning]"
    """
    missing = [name for name in packages or EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed. "
            f'Run: pip install "rlobjectives[{extra}]"',
            name=missing[0],
        )
