"""Objects named in a configuration: ``package.module.name`` or ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from rlobjectives.errors import CapabilityError

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
    module_name, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module_name and separator and name):
        raise CapabilityError(f"{role} {path!r} is not a dotted path; expected 'package.module.name'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise CapabilityError(
            f"{role} {path!r}: there is no module {error.name!r}. Check the spelling, and that its folder is "
            "installed or on PYTHONPATH."
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [one for one in vars(module) if not one.startswith("_")]
        raise CapabilityError(
            f"{role} {path!r}: module {module_name!r} has no {name!r}. It has: {', '.join(public) or 'nothing'}."
        ) from None
