"""Options in words that are the same in every process, for ranks and resumed runs to compare."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["described"]

_STATE = frozenset({"logging", "threading", "_thread", "io", "_io"})
"""Modules whose objects are the state of a process, and no options."""
_DEEPEST = 12
_MOST = 20_000
_digests: Any = WeakTensorKeyDictionary()


def described(value: object, *, objects: bool = True) -> str:
    """A value in words that hold no address: equal in all processes that hold equal values.

    Objects count with their options: the fields of a dataclass and whatever else stands in ``vars``, nested. Tensors
    count with dtype, shape and a digest of their content, functions with their qualified name and what they close over.
    What an object's class names in ``may_differ`` is left out, and so is what a ``cached_property`` keeps. Modules of
    torch, loggers, locks, threads, open files, and objects without attributes of their own count with their class
    alone, and so do lists, dictionaries and sets that a function holds, which it may fill as it runs.

    Args:
        value: Anything.
        objects: Whether objects that are neither dataclasses, containers nor functions count with their attributes;
            otherwise with their class alone.

    Example:
        >>> class Cap:
        ...     def __init__(self, cap): self.cap = cap
        >>> described(Cap(0.9)), described({"betas": [0.9, 0.95]})
        ('Cap(cap=0.9)', "{'betas': (0.9, 0.95)}")
    """
    return _Description().of(value, enter=objects)


class _Description:
    """One description: where it stands, so that it ends on circles and on objects without an end."""

    def __init__(self) -> None:
        self.above: set[int] = set()
        self.pieces = 0
        self.held = 0  # functions whose closure or defaults are being described

    def of(self, value: object, *, enter: bool = True) -> str:
        """The words; unless `enter`, objects of unknown classes count with their class alone."""
        self.pieces += 1
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        if isinstance(value, (bytes, bytearray)):
            return f"bytes({_digest(bytes(value))})"
        if isinstance(value, torch.device):
            return value.type  # each rank may have a device of its own
        if isinstance(value, (torch.dtype, PurePath)):
            return str(value)
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if id(value) in self.above or len(self.above) >= _DEEPEST or self.pieces >= _MOST:
            return f"{type(value).__name__}(…)"
        self.above.add(id(value))
        try:
            return self._inside(value, enter=enter)
        finally:
            self.above.discard(id(value))

    def _inside(self, value: Any, *, enter: bool) -> str:
        if self.held and isinstance(value, (MutableSequence, MutableMapping, MutableSet)):
            return type(value).__name__
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if any(base.__module__ in _STATE for base in type(value).__mro__):
            return type(value).__name__
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.of(entry, enter=enter) for entry in value)})"
        if isinstance(value, Mapping):
            keys = sorted(((self.of(key), key) for key in value), key=lambda one: one[0])
            entries = (f"{words}: {self.of(value[key], enter=enter)}" for words, key in keys)
            return f"{{{', '.join(entries)}}}"
        if isinstance(value, AbstractSet):
            return f"{{{', '.join(sorted(self.of(entry, enter=enter) for entry in value))}}}"
        if isinstance(value, functools.partial):
            options = [*map(self.of, value.args), *self._named(value.keywords.items())]
            return f"partial({', '.join([self.of(value.func), *options])})"
        if isinstance(value, types.MethodType):
            return f"{self.of(value.__self__, enter=enter)}.{value.__name__}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, nn.Module) or not (enter or dataclasses.is_dataclass(value)):
            return getattr(value, "__qualname__", type(value).__name__)
        if hasattr(value, "__array_interface__"):
            return f"array({value.dtype}, {list(value.shape)}, {_digest(value.tobytes())})"
        found = dict(_attributes(value))
        if not found and not dataclasses.is_dataclass(value):
            return getattr(value, "__qualname__", type(value).__name__)
        return f"{type(value).__name__}({', '.join(self._named(found.items()))})"

    def _named(self, options: Any) -> list[str]:
        return [f"{name}={self.of(option)}" for name, option in options]

    def _function(self, function: types.FunctionType) -> str:
        """Its name; what it closes over, and its defaults, are the options of a function made by another."""
        name = f"{function.__module__}.{function.__qualname__}"
        held = dict(_closed_over(function))
        held.update(function.__kwdefaults__ or {})
        held.update((f"default {place}", one) for place, one in enumerate(function.__defaults__ or ()))
        self.held += 1
        options = ", ".join(f"{label}={self.of(one, enter=False)}" for label, one in held.items())
        self.held -= 1
        return f"{name}[{options}]" if options else name


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType())  # bound ones


def _attributes(value: Any) -> Iterator[tuple[str, object]]:
    """The options of an object: a dataclass's fields in their order, then everything else by name."""
    kind = type(value)
    apart = frozenset(getattr(kind, "may_differ", ()))
    own = [one.name for one in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
    for name in dict.fromkeys([*own, *sorted({*vars_of(value), *slots} - {*own})]):
        if name in apart or isinstance(getattr(kind, name, None), functools.cached_property):
            continue
        yield name, getattr(value, name)


def vars_of(value: object) -> Mapping[str, object]:
    """``vars``, of objects that have them."""
    return getattr(value, "__dict__", {})


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    names = [names] if isinstance(names, str) else list(names)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _tensor(tensor: Tensor) -> str:
    words = f"{tensor.dtype}, {list(tensor.shape)}"
    # Shards differ from rank to rank, and what has no content has no digest.
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type == "meta":
        return f"{type(tensor).__name__}({words})"
    if tensor.is_inference():
        return f"tensor({words}, {_content(tensor)})"
    # Read from the device only where it has changed: the window asks at every step.
    version, digest = _digests.get(tensor, (-1, ""))
    if version != tensor._version:
        digest = _content(tensor)
        _digests[tensor] = (tensor._version, digest)
    return f"tensor({words}, {digest})"


def _content(tensor: Tensor) -> str:
    here = tensor.detach().cpu().contiguous()
    size = here.numel() * here.element_size()
    return _digest(ctypes.string_at(here.data_ptr(), size) if size else b"")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
