"""How many exchanges a step costs, which README, docs and docstrings say: counted, for every named objective."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlobjectives import ALGORITHMS
from rlobjectives.testing.cases import draw_case
from rlobjectives.testing.simulate import whole
from tests.parts import OBJECTIVES

ROOT = Path(__file__).resolve().parent.parent
USUAL = 2
"""One opens the window, one merges its metrics."""
MORE = {"m2po": 4, "dapo_entropy": 4, "kl_cov": 5}
"""A bound or a threshold that a search over the whole window finds takes a pre-pass of several rounds."""


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_exchanges_of_a_step(name: str) -> None:
    objective = OBJECTIVES[name]
    case = draw_case(3, (3, 2, 4)).without(objective.estimator.refused())
    assert whole(objective, case).collectives == [MORE.get(name, USUAL)]


def test_the_page_says_so() -> None:
    text = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    assert "Two exchanges per step" in text
    for name, count in MORE.items():
        words = {4: "four", 5: "five"}
        assert f"`{name}` {words[count]}" in text
