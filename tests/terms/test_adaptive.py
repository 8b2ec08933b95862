"""Coefficients that follow a target."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from rlobjectives import GRPO, AdaptiveCoefficient, CapabilityError, KLPenalty, Objective, SteppedCoefficient


def test_the_published_step() -> None:
    start = AdaptiveCoefficient(coef=0.1, target=0.06, horizon=10_000)
    assert start.update(0.09, sequences=256).coef == pytest.approx(0.100512, rel=1e-12)
    assert start.update(0.0, sequences=256).coef == pytest.approx(0.1 * (1 - 0.2 * 0.0256), rel=1e-12)
    assert start.update(0.0606, sequences=256).coef == pytest.approx(0.1 * (1 + 0.01 * 0.0256), rel=1e-9)
    assert start.coef == 0.1, "an update returns a new value and leaves the old one alone"


def test_a_step_builds_the_next_objective() -> None:
    coefficient = AdaptiveCoefficient(coef=0.1, target=0.06).update(0.09, sequences=256)
    objective = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1))
    assert isinstance(objective.kl, KLPenalty)
    moved = replace(objective, kl=replace(objective.kl, coef=coefficient.coef))
    assert isinstance(moved.kl, KLPenalty)
    assert moved.kl.coef == coefficient.coef
    assert pickle.loads(pickle.dumps(coefficient)) == coefficient


def test_entropy_steps_towards_its_target_and_rests_above_it() -> None:
    coefficient = SteppedCoefficient(target=0.3, step=0.1, high=0.25)
    seen = []
    for entropy in (0.1, 0.3, 0.2, 0.5, 0.5, 0.5, 0.1):
        coefficient = coefficient.update(entropy)
        seen.append((round(coefficient.coef, 12), round(coefficient.active, 12)))
    assert seen == [(0.1, 0.1), (0.2, 0.2), (0.25, 0.25), (0.15, 0.0), (0.05, 0.0), (0.0, 0.0), (0.1, 0.1)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveCoefficient(coef=0.0, target=0.1),
        lambda: AdaptiveCoefficient(coef=0.1, target=float("nan")),
        lambda: AdaptiveCoefficient(coef=0.1, target=0.1).update(float("inf"), sequences=1),
        lambda: SteppedCoefficient(target=0.1, coef=2.0),
        lambda: SteppedCoefficient(target=0.1).update(float("nan")),
    ],
)
def test_numbers_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(CapabilityError):
        make()
