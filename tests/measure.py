"""What a computation costs, without a clock: operations dispatched, and bytes alive at the worst moment."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Cost(TorchDispatchMode):
    """Counts operations, and the most memory held at once by tensors made inside the block.

    Attributes:
        operations: Operations that reached a kernel (views included).
        peak: Largest number of bytes alive at once, results included, inputs not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                storage = one.untyped_storage()
                self._alive[storage.data_ptr()] = (weakref.ref(one), storage.nbytes())
        self._alive = {key: item for key, item in self._alive.items() if item[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
