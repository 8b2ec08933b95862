"""Reward functions: missing scores stay missing, and wrong answers are named."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlobjectives import CapabilityError, ShapeError
from rlobjectives.causal_lm.rewards import RewardFunctions


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


def gaps(prompts, completions, *, answer, **columns):
    return [None, math.nan, float(answer[2])]


async def waits(prompts, completions, **columns):
    return [0.5] * len(completions)


class Scorer:
    def __call__(self, prompts, completions, **columns):
        return [1.0 * len(text) for text in completions]


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
        ("math.sqrt", "expected a list of reward functions"),
        ([Scorer], "is a class; expected a function"),
        ([waits], "is asynchronous"),
        ([lambda prompts: [1.0]], "too many positional arguments"),
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


def test_every_function_gets_lists_of_its_own():
    def spoils(prompts, completions, *, answer, **columns):
        count = len(completions)
        for given in (prompts, completions, answer):
            given.clear()
        return [0.0] * count

    def reads(prompts, completions, *, answer, **columns):
        return [float(len(p) + len(c) + len(a)) for p, c, a in zip(prompts, completions, answer, strict=True)]

    prompts, completions, columns = ["a", "b"], ["x", "yy"], {"answer": ["1", "2"]}
    rewards, _, _ = RewardFunctions([spoils, reads])(prompts, completions, columns)
    assert rewards.tolist() == [[0.0, 3.0], [0.0, 4.0]]
    assert (prompts, completions, columns) == (["a", "b"], ["x", "yy"], {"answer": ["1", "2"]})


def test_scores_are_counted_against_what_was_given():
    def drops(prompts, completions, **columns):
        completions.pop()
        return [1.0] * len(completions)

    with pytest.raises(ShapeError, match="returned 1 scores for 2 completions"):
        RewardFunctions([drops])(["a", "b"], ["x", "y"], {})


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_arrays_are_taken_as_lists(kind):
    def column(prompts, completions, **columns):
        return np.array([1, 2], dtype=kind)

    assert RewardFunctions([column, Scorer()])(["a", "b"], ["", "x"], {})[0].tolist() == [
        [1.0, 0.0],
        [2.0, 1.0],
    ]


@pytest.mark.parametrize(
    "answer", [np.ones((2, 1)), np.array(1.0), torch.ones(2, 1), np.array([True, False])]
)
def test_arrays_of_another_shape_or_kind_are_not(answer):
    def wrong(prompts, completions, **columns):
        return answer

    with pytest.raises(ShapeError, match="wrong"):
        RewardFunctions([wrong])(["a", "b"], ["", ""], {})


def test_a_function_that_does_not_take_the_columns_is_told_the_signature():
    def without(prompts, completions):
        return [1.0] * len(completions)

    def wants(prompts, completions, *, level, **columns):
        return [1.0] * len(completions)

    with pytest.raises(
        CapabilityError, match=r"without\(prompts, completions\).*\*\*columns.*answer.*unexpected"
    ):
        RewardFunctions([without])(["a"], ["x"], {"answer": ["1"]})
    with pytest.raises(CapabilityError, match="missing a required .*'level'"):
        RewardFunctions([wants])(["a"], ["x"], {"answer": ["1"]})
    assert RewardFunctions([without])(["a"], ["x"], {})[0].tolist() == [[1.0]]


def test_a_type_error_of_the_function_itself_stays_what_it_is():
    def fails(prompts, completions, **columns):
        return ["a" + 1]

    with pytest.raises(TypeError, match="concatenate"):
        RewardFunctions([fails])(["a"], ["x"], {})


def test_functions_that_tell_no_signature_are_simply_called():
    assert RewardFunctions([max])([1.0], [2.0], {})[0].tolist() == [[2.0]]


@pytest.mark.parametrize("name", ["prompts", "completions"])
def test_a_column_must_not_take_the_name_of_an_argument(name):
    with pytest.raises(CapabilityError, match=f"a column called {name}.*Rename"):
        RewardFunctions([half])(["a"], ["x"], {name: ["1"]})
