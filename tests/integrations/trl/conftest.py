"""Every test starts with the environment of a fresh process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Forget what accelerate and transformers leave in the environment.

    transformers 4 writes the precision of one trainer there, and the next one takes it up.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)
