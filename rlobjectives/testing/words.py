"""How parts and examples are printed: as the Python that makes them again."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

__all__ = ["changed"]


def changed(value: Any) -> str:
    """A dataclass by the options that differ from their defaults; the same in every process.

    Example:
        >>> from rlobjectives import GRPO
        >>> changed(GRPO(scale="none"))
        "GRPO(scale='none')"
    """
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    options = {one.name: getattr(value, one.name) for one in fields}
    texts = (
        f"{one.name}={_text(options[one.name])}"
        for one in fields
        if repr(options[one.name]) != repr(one.default)
    )
    return f"{type(value).__name__}({', '.join(texts)})"


def _text(value: object) -> str:
    if isinstance(value, types.FunctionType):
        return value.__name__
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)
