"""What is wrong with an estimate, a name or an option is said in the estimator's own terms."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import numpy
import pytest
import torch

import rlobjectives
from rlobjectives import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    BatchBaseline,
    CapabilityError,
    Component,
    Objective,
    PaddedLayout,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rollouts,
    ShapeError,
)
from tests.parts import given_options

LAYOUT = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("estimator", "columns"),
    [
        (GDPO(), 3),
        (GPG(), 3),
        (BatchBaseline(), 3),
        (ReinforcePlusPlusBaseline(), 3),
        (GRPO(scale="batch"), 3),
    ],
)
def test_an_estimate_without_its_columns(estimator: Any, columns: int) -> None:
    for estimate in (torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, columns + 1), torch.zeros(3, columns)):
        with pytest.raises(ShapeError) as caught:
            Objective(estimator=estimator).freeze([(estimate, LAYOUT)])
        told = str(caught.value)
        assert f"{type(estimator).__name__} estimate has shape {list(estimate.shape)}" in told
        assert f"expected [2, {columns}]" in told


def test_an_estimate_with_a_column_too_many() -> None:
    with pytest.raises(ShapeError, match=r"GRPO estimate has shape \[2, 1\]; expected \[2\]"):
        Objective(estimator=GRPO()).freeze([(torch.zeros(2, 1), LAYOUT)])
    objective = Objective(estimator=GRPO())
    window = objective.freeze([(torch.zeros(2), LAYOUT)])
    with pytest.raises(ShapeError, match=r"GRPO estimate has shape \[2, 1\]; expected \[2\]"):
        window.advantages(torch.zeros(2, 1), LAYOUT)
    with pytest.raises(
        ShapeError, match=r"ReinforcePlusPlus estimate has shape \[2, 3, 3\]; expected \[2, 3, 2\]"
    ):
        Objective(estimator=ReinforcePlusPlus()).freeze([(torch.zeros(2, 3, 3), LAYOUT)])


def _numeric() -> list[Any]:
    found = []
    for name in sorted(rlobjectives.__all__):
        kind = getattr(rlobjectives, name)
        part = isinstance(kind, type) and issubclass(kind, Component) and not inspect.isabstract(kind)
        if not (part and dataclasses.is_dataclass(kind)):
            continue
        hints = typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            taken = typing.get_args(hints[one.name]) or (hints[one.name],)
            if (int in taken or float in taken) and bool not in taken:
                found.append(pytest.param(kind, one.name, id=f"{name}.{one.name}"))
    return found


@pytest.mark.parametrize(("kind", "option"), _numeric())
def test_true_and_false_are_no_numbers(kind: Any, option: str) -> None:
    for value in (True, False):
        with pytest.raises(CapabilityError, match=option):
            kind(**{**given_options(kind), option: value})


@pytest.mark.parametrize(
    "names", ["ab", numpy.array(["a", "b"]), ("a", 1), {"a": 1, "b": 2}, ("a", "a"), ("a",), 3]
)
def test_names_that_are_no_names(names: Any) -> None:
    with pytest.raises(ShapeError, match=r"reward_names is .*; expected"):
        Rollouts(rewards=torch.zeros(2, 2), group_ids=torch.tensor([0, 0]), reward_names=names)
    listed = Rollouts(rewards=torch.zeros(2, 2), group_ids=torch.tensor([0, 0]), reward_names=["a", "b"])
    assert listed.reward_names == ("a", "b")


def test_a_precision_that_is_none() -> None:
    with pytest.raises(ShapeError, match="reward_dtype is 'float32'; expected a torch.dtype"):
        Rollouts(rewards=torch.zeros(2), group_ids=torch.tensor([0, 0]), reward_dtype="float32")


def test_ddof_is_zero_or_one() -> None:
    for kind in (GRPO, GAE, BatchBaseline):
        for value in (False, True, 2, "1", None):
            with pytest.raises(CapabilityError, match="ddof is"):
                kind(ddof=value)
