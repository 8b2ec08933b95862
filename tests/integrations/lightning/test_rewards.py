"""Reward functions: missing scores stay missing, and wrong answers are named."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rlobjectives import CapabilityError, ShapeError
from rlobjectives.integrations.lightning.rewards import RewardFunctions


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


def gaps(prompts, completions, *, answer, **columns):
    return [None, math.nan, float(answer[2])]


def test_none_and_nan_become_unscored_cells():
    functions = RewardFunctions([gaps, half])
    rewards, scored, names = functions(["a"] * 3, ["x", "y", "z"], {"answer": ["1", "2", "3"]})
    assert names == functions.names == ("gaps", "half")
    assert scored.tolist() == [[False, True], [False, True], [True, True]]
    assert rewards.tolist() == [[0.0, 0.5], [0.0, 0.5], [3.0, 0.5]]


def test_tensors_are_taken_as_lists():
    def column(prompts, completions, **columns):
        return torch.tensor([1.0, 2.0])

    assert RewardFunctions([column])(["a", "b"], ["", ""], {})[0].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1.0], "returned 1 scores for 2 completions"),
        (1.0, "returned float"),
        ([True, False], "gave True (bool)"),
        (["good", "bad"], "gave 'good' (str)"),
    ],
)
def test_wrong_answers_are_named(answer, words):
    def wrong(prompts, completions, **columns):
        return answer

    with pytest.raises(ShapeError) as caught:
        RewardFunctions([wrong])(["a", "b"], ["", ""], {})
    assert words in str(caught.value)
    assert "'wrong'" in str(caught.value)


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([half, half], "Two reward functions are called 'half'"),
        (["half"], "not a dotted path"),
        (["no.such.module"], "no module 'no'"),
        (["math.pi"], "is a float; expected a function"),
    ],
)
def test_bad_functions_are_refused(functions, words):
    with pytest.raises(CapabilityError) as caught:
        RewardFunctions(functions)
    assert words in str(caught.value)


def test_an_answer_without_a_number_is_wrong_not_unscored(monkeypatch):
    """Unscored completions are left out of the accuracy, so an answer that says nothing must be scored."""
    from examples import smollm2

    verifier = SimpleNamespace(score_answer=lambda found, entry: float(found == entry["answer"]))
    monkeypatch.setattr(smollm2, "task", lambda: verifier)
    assert smollm2.correct([""] * 3, ["It is 4.", "four", "5"], answer=["4"] * 3) == [1.0, 0.0, 0.0]
