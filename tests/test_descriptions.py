"""Options in words: equal in every process that holds equal values, and different where anything counts."""

from __future__ import annotations

import enum
import functools
import io
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from rlobjectives import GRPO, ImportanceCorrection, Objective, PolicyLoss, Rejection, TokenLoss
from rlobjectives.descriptions import described
from tests.ranks import run_ranks


class Schedule:
    """An object inside an option."""

    def __init__(self, start: float) -> None:
        self.start = start

    def at(self, step: int) -> float:
        return self.start / (1 + step)


class Capped(PolicyLoss):
    """A loss that is no dataclass, and keeps its option under a private name."""

    may_differ: ClassVar[frozenset[str]] = frozenset({"seen"})

    def __init__(self, cap: float, schedule: Schedule | None = None, table: Tensor | None = None) -> None:
        self._cap, self.schedule, self.table, self.seen = cap, schedule, table, 0

    @cached_property
    def doubled(self) -> float:
        return 2 * self._cap

    def value_and_slope(self, tokens: Any, context: Any) -> TokenLoss:
        return TokenLoss(tokens.logprobs, torch.full_like(tokens.logprobs, self._cap))


@dataclass(frozen=True)
class Tagged:
    """A dataclass that carries more than its fields."""

    name: str = "a"

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", 3)


class Colour(enum.Enum):
    RED = 1


def scaled(factor: float) -> Callable[[float], float]:
    def inner(x: float, *, shift: float = 0.0) -> float:
        return factor * x + shift

    return inner


def power(x: float, exponent: float) -> float:
    return x**exponent


EVERYTHING = {
    "numbers": (1, 1.5, True, None, "text", b"bytes"),
    "containers": ({"b": [1], "a": {3, 1, 2}}, frozenset({"x", "y"})),
    "enum": Colour.RED,
    "tensor": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "object": Capped(0.9, Schedule(0.1), torch.ones(2)),
    "dataclass": Tagged(),
    "functions": (scaled(2.0), functools.partial(power, exponent=2.0), Schedule(1.0).at),
    "module": nn.Linear(2, 2),
    "kinds": (torch.bfloat16, Path("a/b"), int, torch.device("cpu")),
}


def everything() -> str:
    return described(EVERYTHING)


def test_words_are_the_same_in_other_processes() -> None:
    mine = everything()
    assert run_ranks(everything, 2) == [mine, mine]
    assert " at 0x" not in mine


LOOP: list[Any] = [1]
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Capped(0.9), Capped(0.1)),
        (Capped(0.9, Schedule(0.1)), Capped(0.9, Schedule(0.2))),
        (Capped(0.9, table=torch.ones(3)), Capped(0.9, table=torch.tensor([1.0, 1.0, 2.0]))),
        (Capped(0.9, table=torch.ones(3)), Capped(0.9, table=torch.ones(1, 3))),
        (Capped(0.9, table=torch.ones(3)), Capped(0.9, table=torch.ones(3, dtype=torch.float64))),
        (scaled(2.0), scaled(3.0)),
        (functools.partial(power, exponent=2.0), functools.partial(power, exponent=3.0)),
        (Rejection(low=0.5), Rejection(low=0.6)),
        (Schedule(1.0).at, Schedule(2.0).at),
        ({"a": 1}, {"a": 2}),
        (LOOP, [1]),
    ],
)
def test_what_differs_is_described_differently(one: object, other: object) -> None:
    assert described(one) != described(other)


def test_a_tensor_changed_in_place_is_seen() -> None:
    part = Capped(0.9, table=torch.zeros(3))
    before = described(part)
    assert part.table is not None
    part.table[1] = 1.0
    assert described(part) != before


def test_caches_and_what_may_differ_are_left_out() -> None:
    part, other = Capped(0.9), Capped(0.9)
    part.seen = 7
    assert part.doubled == 1.8
    assert described(part) == described(other) == "Capped(_cap=0.9, schedule=None, table=None)"


def test_objects_count_with_their_class_alone_where_asked() -> None:
    assert described(Schedule(1.0), objects=False) == "Schedule"
    assert described((1, Tagged()), objects=False) == "(1, Tagged(name='a', extra=3))"


def counting() -> Callable[[float], float]:
    """Functions that keep books, in what they close over and in a default."""
    history: list[float] = []
    seen: dict[str, Any] = {}

    def inner(x: float, memo: dict[float, float] = {}) -> float:  # noqa: B006  # shared on purpose
        history.append(x)
        seen[str(x)] = memo[x] = x
        return x

    return functools.partial(inner)


def test_what_a_function_fills_as_it_runs_does_not_count() -> None:
    reward = counting()
    before = described(reward)
    reward(0.5)
    assert described(reward) == before
    assert "history=list" in before


def test_loggers_locks_and_modules_count_with_their_class_or_name() -> None:
    part = Capped(0.9)
    log = logging.getLogger("rlobjectives.described")
    vars(part).update(log=log, lock=threading.Lock(), out=io.StringIO(), library=functools)
    before = described(part)
    log.setLevel(logging.DEBUG)
    part.__dict__["out"].write("a line")
    try:
        assert described(part) == before
    finally:
        log.setLevel(logging.NOTSET)
    assert len(before) < 200
    assert "log=Logger" in before
    assert "library=module functools" in before


def test_the_order_of_a_mapping_does_not_count() -> None:
    assert described({"a": 1, "b": 2}) == described({"b": 2, "a": 1})


def test_an_objective_says_all_of_its_options() -> None:
    given = Objective(
        estimator=GRPO(),
        policy_loss=Capped(0.9),
        correction=ImportanceCorrection(reject=(Rejection(low=0.5),)),
        entropy_coef=0.01,
    )
    found = given.descriptions()
    assert found["policy_loss"] == "Capped(_cap=0.9, schedule=None, table=None)"
    assert "Rejection(" in found["correction"]
    assert "low=0.5" in found["correction"]
    assert found["entropy_coef"] == "0.01"
    assert "entropy_coef" not in Objective(estimator=GRPO()).description
