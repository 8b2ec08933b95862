"""accelerate divides each loss by the accumulation steps, as README and `GradientScale` say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlobjectives import GradientScale

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(GradientScale.for_ddp(1), 3.0), (GradientScale(averaged_ranks=1, accumulation_divisor=2), 6.0)],
)
def test_accumulation_halves_the_gradient(scale: GradientScale, expected: float) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.tensor(1.0))
    for slope in (2.0, 4.0):  # two micro-batches, whose sum is the window's loss
        accelerator.backward(slope * weight * scale.factor)
    assert float(weight.grad) == expected
