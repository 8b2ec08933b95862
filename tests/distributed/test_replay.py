"""A pre-pass leaves no trace: randomness, modes and iterator positions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from rlobjectives import WindowError
from rlobjectives.distributed import RandomState, ReplayIterator, replay


def draw() -> tuple[float, float, float]:
    import numpy as np

    return float(torch.rand(1)), random.random(), float(np.random.rand())  # noqa: NPY002


def test_every_generator_is_put_back():
    state = RandomState()
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


@pytest.mark.gpu
def test_the_device_generator_is_put_back():
    torch.rand(1, device="cuda")
    state = RandomState()
    first = torch.rand(3, device="cuda")
    state.restore()
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_modes_and_randomness_of_the_training_pass_do_not_depend_on_the_pre_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1)))
    model[2].eval()
    torch.manual_seed(3)
    expected = model(torch.ones(2, 4))
    torch.manual_seed(3)
    with replay(model):
        model.eval()
        assert not model(torch.ones(2, 4)).requires_grad
        draw()
    assert [part.training for part in model.modules()] == [True, True, True, False, False]
    assert torch.equal(model(torch.ones(2, 4)), expected)


def test_everything_is_put_back_after_an_error():
    model, data = nn.Dropout(0.5), ReplayIterator(range(5))
    state = torch.get_rng_state()

    def fail() -> None:
        with replay(model, data=data):
            model.eval()
            next(data)
            torch.rand(3)
            raise KeyError("a forward failed")

    with pytest.raises(KeyError):
        fail()
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert list(data) == [0, 1, 2, 3, 4]


def test_the_source_is_read_once_and_items_are_the_same_objects():
    reads = []

    def source():
        for number in range(6):
            reads.append(number)
            yield [number]

    data = ReplayIterator(source())
    assert next(data) == [0]
    with replay(data=data):
        seen = [next(data) for _ in range(3)]
    again = [next(data) for _ in range(3)]
    assert all(one is other for one, other in zip(seen, again, strict=True))
    assert reads == [0, 1, 2, 3]
    with data:  # a second mark in the middle of what is left
        assert next(data) == [4]
    assert list(data) == [[4], [5]]
    assert reads == [0, 1, 2, 3, 4, 5]


def test_a_mark_before_the_kept_items_are_used_up():
    data = ReplayIterator(range(5))
    with data:
        assert [next(data), next(data), next(data)] == [0, 1, 2]
    assert next(data) == 0
    with data:
        assert [next(data), next(data), next(data)] == [1, 2, 3]
    assert list(data) == [1, 2, 3, 4]


def test_reading_beyond_the_end_inside_a_mark():
    data = ReplayIterator(range(2))
    with data:
        assert list(data) == [0, 1]
    assert list(data) == [0, 1]
    assert list(data) == []


def test_two_marks_are_refused():
    data = ReplayIterator(range(2))
    data.mark()
    with pytest.raises(WindowError, match="marked already"):
        data.mark()
