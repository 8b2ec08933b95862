"""Seeded nonsense through every door of the core: what fails, fails with an error of ours; what is accepted, makes sense.

The short run is part of the suite; ``pytest -m long tests/test_fuzz.py`` draws twenty times as much.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import random
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Union

import pytest
import torch
from torch import Tensor

import rlobjectives
from rlobjectives import (
    ALGORITHMS,
    GRPO,
    AdaptiveCoefficient,
    Component,
    Estimator,
    LossReduction,
    Objective,
    PackedLayout,
    PaddedLayout,
    PolicyLoss,
    Rejection,
    RLObjectivesError,
    Rollouts,
    SteppedCoefficient,
    TokenBatch,
    TokenLayout,
    TrainerFacts,
)
from tests.parts import ROLES, VALUES

JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 2**70, -(2**70), 0.5, -0.5, 1.0, 1e-9, 1e9, 1e300, -1e300),
    *(math.nan, math.inf, -math.inf, 1j, "", "x", "none", "error", "4e-4", "true", "token", b"ab"),
    *((), (1.0,), (0.5, math.nan), (1, "a"), [1.0, 2.0], ["a"], {}, {"a": 1.0}, {"reward_0": 2.0}, {1, 2}),
    *(
        range(3),
        torch.tensor(1.0),
        torch.zeros(2),
        object,
        int,
        GRPO,
        GRPO(),
        len,
        "os:system",
        "GRPO",
        "x" * 5000,
    ),
)
OTHERS: tuple[type, ...] = (Rejection, AdaptiveCoefficient, SteppedCoefficient, TrainerFacts)
CHECKED_ELSEWHERE = frozenset({"ddof"})
"""Options whose refusals have tests of their own."""
TOLERANCE = 0.04
"""Above the largest number that rounding may make of a log-probability of 0."""


def part_classes() -> list[type]:
    found = [getattr(rlobjectives, name) for name in sorted(rlobjectives.__all__)]
    parts = [one for one in found if isinstance(one, type) and issubclass(one, Component)]
    return [*(one for one in parts if dataclasses.is_dataclass(one) and not inspect.isabstract(one)), *OTHERS]


PARTS = part_classes()
HINTS = {kind: typing.get_type_hints(kind) for kind in PARTS}
NEEDED: dict[str, dict[str, Any]] = {
    **{
        kind.__name__: {one.name: VALUES[one.name] for one in dataclasses.fields(kind) if one.name in VALUES}
        for kind in PARTS
    },
    "Rejection": {"high": 2.0},
    "AdaptiveCoefficient": {"coef": 0.1, "target": 0.1},
    "SteppedCoefficient": {"target": 0.1},
}


class Failures(list[str]):
    """What came out that should not have."""

    def run(self, what: Callable[[], Any], words: Callable[[], str]) -> Any:
        """The result, or None after an error of ours; anything else is noted."""
        try:
            return what()
        except RLObjectivesError as error:
            if len(str(error)) > 4000:
                self.append(f"{words()}: a message of {len(str(error))} characters")
        except Exception as error:  # noqa: BLE001  # what is looked for
            self.append(f"{words()}: {type(error).__name__}: {str(error)[:160]}")
        return None

    def settle(self) -> None:
        assert not self, "\n".join([f"{len(self)} failures", *dict.fromkeys(self[:40])])


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:120]}…"


def sensible(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says, and a number at all where it says number."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(sensible(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    if hint is float:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return real and math.isfinite(value) and (not isinstance(value, int) or abs(value) < 2**63)
    if hint is str:
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, (tuple, list, range)) and all(sensible(one, arguments[0]) for one in value)
    return True


def nonsense(part: Any, kind: type) -> Iterator[str]:
    for one in dataclasses.fields(kind):
        value = getattr(part, one.name)
        if one.init and value is not one.default and not sensible(value, HINTS[kind][one.name]):
            yield f"{kind.__name__}({one.name}={brief(value)}) was accepted"


# Data ------------------------------------------------------------------------------------------------


def layouts(rng: random.Random) -> TokenLayout:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])
    facts = {"sequence_mask": torch.tensor([True, True, False])} if rng.random() < 0.3 else {}
    if rng.random() < 0.5:
        return PaddedLayout(mask, **facts).with_prompts(torch.tensor([7, 7, 7]))
    cuts = torch.tensor([0, 4, 8, 12])
    return PackedLayout(cuts, mask.reshape(-1), **facts).with_prompts(torch.tensor([7, 7, 7]))


def rollout_columns(layout: TokenLayout) -> dict[str, Any]:
    minus, ones = torch.full(layout.shape, -1.0), torch.ones(layout.shape)
    return {
        "rewards": torch.tensor([[1.0, 0.5], [0.0, 1.0], [0.0, 0.0]]),
        "group_ids": torch.tensor([7, 7, 7]),
        "layout": layout,
        "scored": torch.ones(3, 2, dtype=torch.bool),
        "values": 0.1 * ones,
        "token_rewards": torch.where(layout.mask, 0.5, 0.0),
        "old_logprobs": minus,
        "ref_logprobs": 1.5 * minus,
        "behavior_logprobs": 1.2 * minus,
        "teacher_logprobs": minus,
        "squared_probs": 0.5 * ones,
        "session_ids": torch.tensor([1, 1, 2]),
        "truncated": torch.tensor([False, True, False]),
        "bootstrap_values": torch.tensor([0.0, 0.5, 0.0]),
        "greedy_rewards": torch.zeros(3, 2),
    }


def token_columns(layout: TokenLayout) -> dict[str, Any]:
    minus, ones = torch.full(layout.shape, -1.0), torch.ones(layout.shape)
    return {
        "logprobs": (1.1 * minus).requires_grad_(),
        "layout": layout,
        "advantages": ones.double(),
        "old_logprobs": minus,
        "behavior_logprobs": 1.2 * minus,
        "ref_logprobs": 1.5 * minus,
        "entropy": 0.7 * ones,
        "teacher_logprobs": minus,
        "behavior_kl": 0.1 * ones,
        "ref_kl": 0.2 * ones,
        "teacher_divergence": 0.3 * ones,
        "values": 0.1 * ones,
        "old_values": 0.2 * ones,
        "returns": ones,
        "behavior_known": layout.mask.clone(),
        "teacher_known": layout.mask.clone(),
    }


def spoiled(column: Any, rng: random.Random) -> Any:
    """The column with something about it that may be wrong."""
    if not isinstance(column, Tensor) or rng.random() < 0.15:
        return rng.choice(JUNK)
    change = rng.randrange(12)
    column = column.detach().clone()
    if change == 0:
        return column[..., :-1]
    if change == 1:
        return column.unsqueeze(rng.choice((0, -1)))
    if change == 2:
        return column.to(rng.choice((torch.int64, torch.bool, torch.float16, torch.complex64, torch.uint8)))
    if change == 3:
        return column.to("meta")
    if change == 4:
        return column.tolist()
    if change == 5:
        return column[:0]
    if change == 6:
        return column.numpy()
    if column.dtype is torch.bool:
        return ~column
    if not column.is_floating_point():
        return column - 5
    bad = rng.choice((math.nan, math.inf, -math.inf, 1e30, -1e30, 5.0, 0.5, 1e-7, 0.0, -0.0))
    column.reshape(-1)[rng.randrange(column.numel())] = bad
    return column.requires_grad_(rng.random() < 0.5)


def counted(layout: TokenLayout, column: Tensor) -> Tensor:
    return column.detach()[layout.mask]


def records(rng: random.Random, failures: Failures) -> None:
    """A rollout or a micro-batch with one or two columns spoiled; what is accepted is used."""
    layout = layouts(rng)
    kind, columns = rng.choice(((Rollouts, rollout_columns), (TokenBatch, token_columns)))
    good = columns(layout)
    for name in rng.sample(sorted(good), rng.randrange(len(good) // 2)):
        if name not in ("rewards", "group_ids", "layout", "logprobs"):
            del good[name]
    wrong = {name: spoiled(good[name], rng) for name in rng.sample(sorted(good), rng.choice((1, 1, 2)))}
    words = lambda: (
        f"{kind.__name__} with {', '.join(f'{name}={brief(value)}' for name, value in wrong.items())}"
    )
    record = failures.run(lambda: kind(**{**good, **wrong}), words)
    if record is None:
        return
    if isinstance(record, Rollouts):
        if not torch.isfinite(record.rewards).all():
            failures.append(f"{words()}: rewards that are not finite were accepted")
        for name in ("old_logprobs", "ref_logprobs", "behavior_logprobs", "teacher_logprobs"):
            column = getattr(record, name)
            if column is not None and not (counted(record.layout, column) <= TOLERANCE).all():
                failures.append(f"{words()}: {name} above 0 was accepted")
        part = rng.choice(ESTIMATORS)
        estimate = failures.run(lambda: part.estimate(record), lambda: f"{brief(part)} of {words()}")
        if estimate is not None and record.layout is not None:
            step(Objective(estimator=part), estimate, record.layout, None, failures, words)
        return
    objective = rng.choice(OBJECTIVES)
    step(objective, torch.tensor([1.0, -1.0, 0.0]), record.layout, record, failures, words)


def step(
    objective: Objective,
    estimate: Tensor,
    layout: TokenLayout,
    tokens: TokenBatch | None,
    failures: Failures,
    words: Callable[[], str],
) -> None:
    """A whole window. No report may hold a log-probability above 0 or a number that is not finite."""

    def window() -> Any:
        batch = tokens or TokenBatch(**token_columns(layout))
        builder = objective.window()
        builder.add(estimate=estimate, layout=layout)
        if objective.capabilities.needs_prepass:
            builder.add_prepass(batch)
        frozen = builder.freeze()
        batch = batch.replace(advantages=frozen.advantages(estimate, layout))
        output = frozen.loss(batch)
        if output.loss.requires_grad:
            output.loss.backward()
        return batch, frozen.summarize([output])

    found = failures.run(window, lambda: f"{objective.name} over {words()}")
    if found is None:
        return
    batch, report = found
    if not math.isfinite(report["loss/total"]):
        failures.append(f"{objective.name} over {words()}: a loss of {report['loss/total']}")
    gradient = batch.logprobs.grad
    if gradient is not None and not torch.isfinite(gradient).all():
        failures.append(f"{objective.name} over {words()}: a gradient that is not finite")
    for name in objective.columns():
        column = getattr(batch, name)
        if name.endswith("logprobs") and column is not None:
            one = objective.reads().get(name)
            known = batch.known(name) if one is not None and one.unknown else None
            where = batch.layout.mask if known is None else batch.layout.mask & known
            if not (column.detach()[where] <= TOLERANCE).all():
                failures.append(f"{objective.name} over {words()}: {name} above 0 was accepted")


# Options ---------------------------------------------------------------------------------------------


def options(rng: random.Random, failures: Failures) -> None:
    """A part with one or two options of any kind; some of what is accepted is used."""
    kind = rng.choice(PARTS)
    names = [one.name for one in dataclasses.fields(kind) if one.init and one.name not in CHECKED_ELSEWHERE]
    if not names:
        return
    given = {name: rng.choice(JUNK) for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2))))}
    words = lambda: f"{kind.__name__}({', '.join(f'{name}={brief(value)}' for name, value in given.items())})"
    part = failures.run(lambda: kind(**{**NEEDED.get(kind.__name__, {}), **given}), words)
    if part is None:
        return
    if kind is not rlobjectives.FunctionEstimator:  # whose function is anything that can be called
        failures.extend(nonsense(part, kind))
    role = next((name for name, base in ROLES.items() if isinstance(part, base)), None)
    if role is None or rng.random() > 0.2:
        return
    objective = failures.run(lambda: Objective(**{"estimator": GRPO(), role: part}), words)
    if objective is not None:
        layout = layouts(rng)
        rollouts = Rollouts(**rollout_columns(layout))
        if kind not in (rlobjectives.FunctionEstimator, rlobjectives.GivenAdvantages):
            estimate = failures.run(lambda: objective.estimator.estimate(rollouts), words)
            if estimate is not None:
                step(objective, estimate, layout, None, failures, words)


def objectives(rng: random.Random, failures: Failures) -> None:
    """An objective, by name or of parts, with a field of any kind."""
    fields = [one.name for one in dataclasses.fields(Objective)]
    given = {rng.choice([*fields, "clip_low", "x"]): rng.choice(JUNK)}
    name = rng.choice(
        [*ALGORITHMS] * 2 + ["GRPO", "reinforce++", "math:pi", "os:getcwd", "nowhere:Thing", ":", ""]
    )
    words = lambda: f"Objective.named({name!r}, {', '.join(f'{k}={brief(v)}' for k, v in given.items())})"
    found = failures.run(lambda: Objective.named(name, **given), words)
    if found is not None and not isinstance(found, Objective):
        failures.append(f"{words()}: gave {brief(found)}")
    if next(iter(given)) in fields:
        found = failures.run(lambda: Objective(**{"estimator": GRPO(), **given}), words)
        facts = {rng.choice([one.name for one in dataclasses.fields(TrainerFacts)]): rng.choice(JUNK)}
        if found is not None:
            failures.run(
                lambda: found.check(TrainerFacts(**facts)), lambda: f"{words()} against {brief(facts)}"
            )


def shapes(rng: random.Random, failures: Failures) -> None:
    """A layout of anything, and facts of anything."""
    good = layouts(rng)
    mask = spoiled(good.mask, rng)
    kinds: Sequence[Callable[[], Any]] = (
        lambda: PaddedLayout(mask),
        lambda: PackedLayout(spoiled(torch.tensor([0, 4, 8, 12]), rng), good.mask.reshape(-1)),
        lambda: PackedLayout(
            torch.tensor(rng.choice(([0, 8, 4, 12], [1, 12], [0, 4], [0, 99], []))), good.mask.reshape(-1)
        ),
        lambda: PackedLayout(torch.tensor([0, 12]), mask),
        lambda: good.with_facts(
            **{rng.choice(("sequence_mask", "total_tokens", "mine")): spoiled(torch.ones(3), rng)}
        ),
        lambda: good.with_mask(mask),
        lambda: good.with_prompts(spoiled(torch.tensor([7, 7, 7]), rng)),
    )
    which = rng.randrange(len(kinds))
    failures.run(kinds[which], lambda: f"layout {which} of {brief(mask)}")


ESTIMATORS: list[Estimator] = [
    kind(**NEEDED.get(kind.__name__, {}))
    for kind in PARTS
    if issubclass(kind, Estimator) and kind.__name__ not in ("FunctionEstimator", "GivenAdvantages")
]
OBJECTIVES = [
    Objective(**{"estimator": GRPO(), role: kind(**NEEDED.get(kind.__name__, {}))}, name=kind.__name__)
    for kind in PARTS
    if issubclass(kind, Component) and not issubclass(kind, Estimator)
    for role, base in ROLES.items()
    if issubclass(kind, base) and kind not in (PolicyLoss, LossReduction)
]
TARGETS = (records, options, objectives, shapes)


def fuzz(target: Callable[[random.Random, Failures], None], seed: int, count: int) -> None:
    rng, failures = random.Random(seed), Failures()
    for _ in range(count):
        target(rng, failures)
    failures.settle()


# What a window of one sequence says, which is no failure.
small_windows = pytest.mark.filterwarnings("ignore:.*compares the sequences of an optimizer step:UserWarning")


@small_windows
@pytest.mark.parametrize(
    ("target", "count"), [(records, 1500), (options, 2500), (objectives, 800), (shapes, 700)]
)
def test_every_failure_is_ours(target: Callable[..., None], count: int) -> None:
    fuzz(target, seed=1, count=count)


@pytest.mark.long
@small_windows
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(2, 12))
def test_every_failure_is_ours_at_length(target: Callable[..., None], seed: int) -> None:
    fuzz(target, seed=seed, count=3000)
