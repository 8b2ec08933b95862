"""The promises of this library as laws, each run on every part and every named objective.

Nothing here knows an algorithm: parts are found by introspection (`tests/parts.py`), windows are drawn
by hypothesis (`tests/strategies.py`) and cut over simulated ranks (`tests/windows.py`).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlobjectives import Objective
from tests.parts import OBJECTIVES
from tests.strategies import cases, cuts
from tests.windows import GARBAGE, Case, MicroBatch, Outcome, Shard, simulate, together, whole

LAW = settings(
    max_examples=int(os.environ.get("LAW_EXAMPLES", "12")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
every_objective = pytest.mark.parametrize("name", list(OBJECTIVES))


def assert_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Loss, gradient and metrics, relative to their own size."""
    loss_scale = max(expected.scale, abs(float(expected.loss)))
    assert abs(float(found.loss - expected.loss)) <= tolerance * loss_scale, (found.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        size = float(gradient.abs().max()) if gradient.numel() else 0.0
        off = float((found.gradients[name] - gradient).abs().max()) if gradient.numel() else 0.0
        assert off <= tolerance * size, f"gradient of {name} is off by {off} of {size}"
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert math.isfinite(value), name
        size = max(abs(value), _companion(name, expected.metrics), loss_scale if "loss" in name else 0.0)
        assert abs(found.metrics[name] - value) <= tolerance * size, (name, found.metrics[name], value)


def _companion(name: str, metrics: dict[str, float]) -> float:
    # A mean near zero is as precise as the spread it averages, and a spread as the mean it is around.
    for one, other in (("mean", "std"), ("std", "mean")):
        if name.endswith(one):
            return abs(metrics.get(name[: -len(one)] + other, 0.0))
    return 0.0


def _cut(objective: Objective, case: Case, data: st.DataObject, tolerance: float) -> None:
    sizes = (1, 2, 3) if objective.capabilities.supports_context_parallel else (1,)
    cut = data.draw(cuts(case, sizes))
    expected = whole(objective, case)
    outcomes = simulate(objective, case, cut.ranks, cut.context)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    assert_same(together(outcomes), expected, tolerance)


@every_objective
@LAW
@given(data=st.data())
def test_partition_in_float64(name: str, data: st.DataObject) -> None:
    _cut(OBJECTIVES[name], data.draw(cases()), data, 1e-12)


@pytest.mark.parametrize("name", list(OBJECTIVES)[::3])
@LAW
@given(data=st.data())
def test_partition_in_float32(name: str, data: st.DataObject) -> None:
    _cut(OBJECTIVES[name], data.draw(cases(dtype=torch.float32)), data, 1e-6)


@every_objective
@LAW
@given(case=cases(), extra=st.integers(0, 4), packed=st.booleans())
def test_layout_changes_nothing(name: str, case: Case, extra: int, packed: bool) -> None:
    expected = whole(OBJECTIVES[name], case)
    assert_same(whole(OBJECTIVES[name], case, Shard(packed=packed, extra=extra)), expected, 1e-12)


@every_objective
@LAW
@given(case=cases(), packed=st.booleans(), garbage=st.sampled_from(GARBAGE))
def test_masked_values_change_nothing(name: str, case: Case, packed: bool, garbage: float) -> None:
    objective = OBJECTIVES[name]
    clean = whole(objective, case, Shard(packed=packed, extra=2))
    dirty = whole(objective, case, Shard(packed=packed, extra=2, garbage=garbage))
    assert torch.equal(clean.loss, dirty.loss)
    assert clean.metrics == dirty.metrics
    for column, gradient in clean.gradients.items():
        assert torch.equal(gradient, dirty.gradients[column])
