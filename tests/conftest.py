"""Set-up that every test shares: environment, seeds, hypothesis profiles."""

from __future__ import annotations

import random
from collections.abc import Iterator

import environment

environment.apply()  # before torch, whose thread pools read it once

import hypothesis
import pytest
import torch

SEED = 20_240_229

# Derandomised: a run is repeatable and a red CI means a change, not luck. No deadline: two cores, many processes.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# pytest --hypothesis-profile=explore looks for new examples, for as long as you like.
hypothesis.settings.register_profile("explore", max_examples=2_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in str(config.getoption("markexpr")):
        left_out = [item for item in items if item.get_closest_marker("long")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seeds and leaves global torch settings as it found them."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    random.seed(SEED)
    torch.manual_seed(SEED)
    yield
    leaked = [
        name
        for name, before, after in (
            ("default dtype", dtype, torch.get_default_dtype()),
            ("grad mode", grad, torch.is_grad_enabled()),
        )
        if before != after
    ]
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    assert not leaked, (
        f"The test changed torch's {' and '.join(leaked)}. Use a context manager that restores it."
    )


@pytest.fixture(scope="session", autouse=True)
def _end_of_ranks() -> Iterator[None]:
    yield
    from tests.ranks import close_pools

    close_pools()


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    """What docstring examples may use without importing it."""
    import rlobjectives

    doctest_namespace["torch"] = torch
    doctest_namespace.update({name: getattr(rlobjectives, name) for name in rlobjectives.__all__})
