"""Randomness that does not depend on when a run was stopped and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from rlobjectives.distributed import RandomState

__all__ = ["base_seed", "derive_seed", "seeded"]


def base_seed(seed: int | None) -> int:
    """The run's seed: the one given, else that of ``seed_everything``, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from several numbers; different numbers give unrelated seeds.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block from a seed in torch (every device), NumPy and `random`, and put their states back after.

    Lightning's checkpoints hold no generator state, and rebuilding a data loader on resume draws from the global
    one. A block that starts from a seed of its own needs neither: the same seed gives the same block.
    """
    state = RandomState()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # the global generator is what user code reads
        yield
    finally:
        state.restore()
