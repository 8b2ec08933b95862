"""Objects named in a configuration: ``package.module.name`` or ``package.module:name``."""

from __future__ import annotations

from typing import Any

from rlobjectives.errors import CapabilityError
from rlobjectives.registry import resolve

__all__ = ["import_object"]


def import_object(path: str, role: str) -> Any:
    """Import what a dotted path names.

    Args:
        path: ``package.module.name`` or ``package.module:name``.
        role: What it is for, as messages call it.

    Raises:
        CapabilityError: If the module cannot be found or has no such name; the message says which.

    Example:
        >>> import_object("math.sqrt", "reward")(4.0)
        2.0
    """
    if "." not in path and ":" not in path:
        raise CapabilityError(f"{role} {path!r} is not a dotted path; expected 'package.module.name'.")
    return resolve(path, role, CapabilityError)
