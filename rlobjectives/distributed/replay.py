"""Running a window's forward once before its losses, as if that first run had never happened."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlobjectives.errors import WindowError

__all__ = ["RandomState", "ReplayIterator", "replay"]

T = TypeVar("T")


class RandomState:
    """The state of every random generator a forward may draw from, taken when this is made.

    PyTorch on the CPU and on each accelerator device that is in use, Python's `random`, and NumPy if it is
    loaded.

    Example:
        >>> state = RandomState()
        >>> first = torch.rand(1)
        >>> state.restore()
        >>> bool(first == torch.rand(1))
        True
    """

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._devices: list[Tensor] = torch.cuda.get_rng_state_all() if _cuda_in_use() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()

    def state_dict(self) -> dict[str, Any]:
        """The states as plain data and tensors, for a checkpoint that is read with ``weights_only=True``."""
        numpy = self._numpy
        if numpy is not None:
            name, keys, *rest = numpy
            numpy = [name, torch.tensor([int(key) for key in keys]), *rest]
        return {"cpu": self._cpu, "devices": self._devices, "python": self._python, "numpy": numpy}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """The inverse of `state_dict`.

        Example:
            >>> state = RandomState.from_state_dict(RandomState().state_dict())
            >>> first = random.random()
            >>> state.restore()
            >>> random.random() == first
            True
        """
        found = cls()
        found._cpu = state["cpu"].cpu()
        found._devices = [one.cpu() for one in state["devices"]] if found._devices else []
        version, numbers, spare = state["python"]
        found._python = (version, tuple(numbers), spare)
        if state["numpy"] is not None and found._numpy is not None:
            name, keys, *rest = state["numpy"]
            found._numpy = (name, [int(key) for key in keys], *rest)
        return found

    def restore(self) -> None:
        """Put every generator back."""
        torch.set_rng_state(self._cpu)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _cuda_in_use() -> bool:
    # Asking an unused CUDA for its state would initialise it, and cost memory on every device.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class ReplayIterator(Generic[T]):
    """An iterator that can go back to where it was marked.

    What is read after `mark` is kept until `rewind` or `release`, and comes again after `rewind`; the source
    itself is read only once, so a data loader's own state moves on as if the first reading had not happened.

    Args:
        source: What to read.

    Example:
        >>> batches = ReplayIterator(range(4))
        >>> next(batches)
        0
        >>> with batches:
        ...     first = [next(batches), next(batches)]
        >>> first, list(batches)
        ([1, 2], [1, 2, 3])
    """

    def __init__(self, source: Iterable[T]) -> None:
        self._source = iter(source)
        self._kept: list[T] = []
        self._position = 0
        self._marked = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._position < len(self._kept):
            item = self._kept[self._position]
            if self._marked:
                self._position += 1
            else:
                self._kept.pop(0)
            return item
        item = next(self._source)
        if self._marked:
            self._kept.append(item)
            self._position += 1
        return item

    def mark(self) -> None:
        """Remember this place.

        Raises:
            WindowError: If a place is remembered already.
        """
        if self._marked:
            raise WindowError("This iterator is marked already. Call rewind() before marking another place.")
        self._marked = True

    def rewind(self) -> None:
        """Go back to the marked place."""
        self._marked, self._position = False, 0

    def __enter__(self) -> ReplayIterator[T]:
        self.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rewind()


@contextmanager
def replay(*modules: nn.Module, data: ReplayIterator[Any] | None = None) -> Iterator[None]:
    """Run a pre-pass: without gradient, and with everything put back at the end, also after an error.

    Random states (CPU, CUDA, Python, NumPy), the train/eval mode of every submodule, and the position of
    ``data`` are as before, so the pass under the losses sees the same micro-batches with the same randomness.
    What a forward changes besides (batch-norm statistics, FP8 scaling factors) is not undone:
    `Objective.check` refuses it.

    Args:
        modules: Modules whose mode to keep.
        data: Micro-batches that the pre-pass reads.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> with replay(model):
        ...     first = model(torch.ones(1, 2))
        >>> bool((first == model(torch.ones(1, 2))).all()), model[1].training
        (True, True)
    """
    modes = [(part, part.training) for module in modules for part in module.modules()]
    state = RandomState()
    if data is not None:
        data.mark()
    try:
        with torch.no_grad():
            yield
    finally:
        if data is not None:
            data.rewind()
        for part, training in modes:
            part.training = training
        state.restore()
