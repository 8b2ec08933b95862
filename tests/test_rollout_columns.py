"""The boundary: what `Rollouts` checks about its optional columns."""

from __future__ import annotations

import pytest
import torch

from rlobjectives import MissingColumnError, NonFiniteError, PaddedLayout, Rollouts, ShapeError
from rlobjectives.rollouts import _TOKEN_COLUMNS

LAYOUT = PaddedLayout(torch.tensor([[True, False], [True, True]]))


def make(**columns):
    return Rollouts(rewards=torch.zeros(2), group_ids=torch.tensor([0, 0]), **{"layout": LAYOUT, **columns})


@pytest.mark.parametrize("name", _TOKEN_COLUMNS)
class TestTokenColumns:
    def test_take_anything_under_a_false_mask(self, name):
        column = torch.tensor([[-1.0, float("nan")], [-2.0, -3.0]], requires_grad=True)
        kept = getattr(make(**{name: column}), name)
        assert not kept.requires_grad

    def test_refuse_a_non_finite_number_that_counts(self, name):
        with pytest.raises(NonFiniteError, match=rf"{name} has 1 non-finite values among 3"):
            make(**{name: torch.tensor([[float("inf"), 0.0], [0.0, 0.0]])})

    def test_refuse_another_shape_or_dtype(self, name):
        with pytest.raises(ShapeError, match=name):
            make(**{name: torch.zeros(2, 3)})
        with pytest.raises(ShapeError, match="floating-point"):
            make(**{name: torch.zeros(2, 2, dtype=torch.int64)})

    def test_need_a_layout(self, name):
        with pytest.raises(MissingColumnError, match="layout"):
            make(**{name: torch.zeros(2, 2), "layout": None})

    def test_are_widened_from_low_precision(self, name):
        assert getattr(make(**{name: torch.zeros(2, 2, dtype=torch.bfloat16)}), name).dtype is torch.float32


def test_sessions_are_numbered_and_checked():
    assert make(session_ids=torch.tensor([9, 4])).sessions.index.tolist() == [1, 0]
    assert make().sessions is None
    with pytest.raises(ShapeError, match="session_ids has dtype"):
        make(session_ids=torch.tensor([0.0, 1.0]))
    with pytest.raises(ShapeError, match="session_ids has shape"):
        make(session_ids=torch.tensor([0, 1, 2]))


def test_truncation_comes_in_pairs_and_counts_where_it_says():
    kept = make(truncated=torch.tensor([True, False]), bootstrap_values=torch.tensor([1.0, float("nan")]))
    assert kept.bootstrap_values is not None
    with pytest.raises(NonFiniteError, match="bootstrap_values"):
        make(truncated=torch.tensor([True, True]), bootstrap_values=torch.tensor([1.0, float("nan")]))
    with pytest.raises(MissingColumnError, match="truncated"):
        make(bootstrap_values=torch.zeros(2))
    with pytest.raises(ShapeError, match="truncated has shape"):
        make(truncated=torch.tensor([True]))
    with pytest.raises(ShapeError, match="bootstrap_values has shape"):
        make(truncated=torch.tensor([True, True]), bootstrap_values=torch.zeros(3))


def test_greedy_rewards_have_the_shape_of_rewards():
    assert make(greedy_rewards=torch.tensor([1, 0])).greedy_rewards.shape == (2, 1)
    with pytest.raises(ShapeError, match="greedy_rewards"):
        make(greedy_rewards=torch.zeros(2, 3))


def test_a_needed_column_is_asked_for_by_name():
    with pytest.raises(MissingColumnError, match=r"MyEstimator reads values.*Rollouts\(values="):
        make().need("values", "MyEstimator")
