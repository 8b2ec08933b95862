"""What may not happen inside a hot path: waiting for the device, and keeping tensors alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostSyncError", "no_host_sync", "surviving_token_tensors"]

_WAITS = {
    "_local_scalar_dense": "reads a number",
    "is_nonzero": "reads a truth value",
    "equal": "compares on the host",
    "nonzero": "has a size that depends on data",
    "masked_select": "has a size that depends on data",
    "_unique2": "has a size that depends on data",
    "unique_dim": "has a size that depends on data",
    "unique_consecutive": "has a size that depends on data",
    "bincount": "has a size that depends on data",
}
_READERS = ("item", "tolist", "numpy", "cpu", "new_tensor", "__bool__", "__int__", "__float__", "__index__")


class HostSyncError(AssertionError):
    """An operation for which the host must wait for the device."""


class _Forbid(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        why = _WAITS.get(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and len(args) < 3:
            why = "has a size that depends on data"
        if name.startswith("index") and name != "index_add" and len(args) > 1:
            indices = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            if any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices):
                why = "selects by a mask, so its size depends on data"
        if why is not None:
            raise HostSyncError(f"aten::{name} {why}")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise `HostSyncError` wherever a CUDA run would wait: at operations, and at readers of tensors."""

    def refuse(name: str) -> Callable[..., Any]:
        def reader(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise HostSyncError(f"Tensor.{name} reads the device, or copies host numbers to it")

        return reader

    def on_host(make: Callable[..., Any]) -> Callable[..., Any]:
        def maker(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                raise HostSyncError(f"torch.{make.__name__} copies host numbers to the device")
            return make(*args, **kwargs)

        return maker

    patches = [mock.patch.object(Tensor, name, refuse(name)) for name in _READERS]
    patches += [
        mock.patch.object(torch, make.__name__, on_host(make)) for make in (torch.tensor, torch.as_tensor)
    ]
    with _Forbid():
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


class _Record(TorchDispatchMode):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.made: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(one) for one in args if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(one, Tensor) and one.numel() >= self.numel and id_of(one) not in given:
                self.made[id_of(one)] = (StorageWeakRef(one.untyped_storage()), one.dtype)
        return found


def id_of(tensor: Tensor) -> int:
    """What two views of the same memory share."""
    address: int = tensor.untyped_storage()._cdata
    return address


def surviving_token_tensors(
    function: Callable[[], Any], numel: int, keep: Callable[[Any], Tensor]
) -> tuple[Tensor, list[torch.dtype]]:
    """Call a function, keep one tensor of its result, and tell which token-sized tensors it keeps alive.

    Args:
        function: Makes the result.
        numel: Size from which a tensor counts.
        keep: The one tensor that is kept.

    Returns:
        The kept tensor, and the dtype of every token-sized tensor made on the way that is still there.
    """
    recorder = _Record(numel)
    with recorder:
        kept = keep(function())
    gc.collect()
    return kept, [dtype for reference, dtype in recorder.made.values() if not reference.expired()]
