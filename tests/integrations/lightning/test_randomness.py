"""What a block draws depends on its seed alone, and leaves no trace behind."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("lightning")

import torch

from rlobjectives.integrations.lightning.randomness import seeded


def drawn():
    return torch.rand(2).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002  # the global generator


def test_a_seeded_block_repeats_itself_and_the_generators_go_on_as_if_it_had_not_been():
    with seeded(3):
        first = drawn()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # as above
    expected = drawn()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # as above
    with seeded(3):
        assert drawn() == first
    assert drawn() == expected


def test_also_after_an_error():
    torch.manual_seed(0)
    expected = torch.rand(2).tolist()
    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError), seeded(3):
        1 / 0  # noqa: B018  # for its error
    assert torch.rand(2).tolist() == expected
