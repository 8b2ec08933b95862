"""What every objective computes is what it computed before: numbers change only where a change of theirs is meant.

A change that is meant is written down with `python tools/frozen_numbers.py write`, and stands in the changelog under
*Numerics*. Before and after any other change, `compare` finds every bit that differs; here a tolerance leaves room for
the last bits of another CPU's exponentials and sums.
"""

from __future__ import annotations

import pytest

import frozen_numbers

TOLERANCE = 1e-13
"""Relative to the largest entry of each quantity. Vectorised and plain exponentials differ by less than 1e-15."""

STORED = frozen_numbers.load()
OBJECTIVES = frozen_numbers.objectives()


def test_every_registered_objective_is_frozen() -> None:
    assert set(STORED) == set(OBJECTIVES), "run python tools/frozen_numbers.py write"


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name in STORED])
def test_the_numbers_are_as_they_were(name: str) -> None:
    found = frozen_numbers.differences(name, OBJECTIVES[name], STORED[name], TOLERANCE)
    assert not found, "\n".join(found)


def test_a_last_bit_is_found() -> None:
    name = "grpo"
    _, runs = frozen_numbers.numbers_of(OBJECTIVES[name])
    stored = {"data": STORED[name]["data"], "numbers": frozen_numbers.pack(runs)}
    assert frozen_numbers.differences(name, OBJECTIVES[name], stored) == []
    changed = runs["packed"]["advantages"]
    place = int(changed.abs().argmax())
    changed[place] += changed[place].abs() * 2.0**-52
    stored["numbers"] = frozen_numbers.pack(runs)
    (told,) = frozen_numbers.differences(name, OBJECTIVES[name], stored)
    assert told.startswith("grpo (packed): advantages differs in 1 of 33 entries, by 2.22e-16 at most")
    assert frozen_numbers.differences(name, OBJECTIVES[name], stored, TOLERANCE) == []
