"""Experience: what it refuses, what it moves, and the stand-in for a rank without a micro-batch."""

import pytest
import torch

from rlobjectives import MissingColumnError, PaddedLayout, Rollouts, ShapeError
from rlobjectives.integrations.lightning import Experience


def make(**columns):
    ids = torch.tensor([[5, 1, 2], [5, 3, 0]])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    given = {
        "input_ids": ids,
        "attention_mask": ids > 0,
        "layout": PaddedLayout(mask),
        "rollouts": Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([4, 4])),
        "ref_logprobs": torch.full((2, 3), -2.0),
    }
    return Experience(**{**given, **columns})


def test_position_zero_cannot_count():
    mask = torch.tensor([[True, True, True], [False, True, False]])
    with pytest.raises(ShapeError, match="position 0"):
        make(layout=PaddedLayout(mask))


@pytest.mark.parametrize(
    "columns",
    [
        {"ref_logprobs": torch.zeros(2, 2)},
        {"extra": {"images": [1]}},
        {"rollouts": Rollouts(rewards=torch.zeros(3), group_ids=torch.zeros(3, dtype=torch.long))},
    ],
)
def test_columns_describe_the_same_sequences(columns):
    with pytest.raises(ShapeError):
        make(**columns)


def test_rows_take_every_column_along_but_not_the_rollouts():
    chosen = make(extra={"texts": ["a", "b"], "lengths": torch.tensor([2, 1])}).rows([1])
    assert chosen.input_ids.tolist() == [[5, 3, 0]]
    assert chosen.layout.mask.tolist() == [[False, True, False]]
    assert chosen.ref_logprobs.shape == (1, 3)
    assert chosen.extra["texts"] == ["b"]
    assert chosen.extra["lengths"].tolist() == [1]
    assert chosen.rollouts is None
    with pytest.raises(MissingColumnError, match="rollouts"):
        chosen.need_rollouts()


def test_moving_keeps_dtypes():
    moved = make(rollouts=None, ref_logprobs=torch.zeros(2, 3, dtype=torch.float64)).to("meta")
    assert moved.ref_logprobs.device.type == moved.layout.mask.device.type == "meta"
    assert moved.ref_logprobs.dtype is torch.float64


def test_moving_takes_rollouts_along():
    moved = make().to("cpu")
    assert moved.need_rollouts().rewards.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("count", [2, 0])
def test_a_dummy_counts_for_nothing(count):
    experience = make(extra={"lengths": torch.tensor([2, 1])})
    dummy = experience.rows(list(range(count))).dummy()
    assert len(dummy) == 1
    assert not dummy.layout.mask.any()
    assert not dummy.layout.sequence_mask().any()
    assert dummy.ref_logprobs.shape == dummy.input_ids.shape
    assert dummy.extra["lengths"].shape == (1,)
    assert bool(dummy.attention_mask.any())


def test_a_dummy_cannot_be_made_up_from_an_empty_list():
    with pytest.raises(MissingColumnError, match="texts"):
        make(extra={"texts": ["a", "b"]}).rows([]).dummy()
