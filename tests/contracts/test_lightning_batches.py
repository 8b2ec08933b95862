"""What Lightning does to the contents of a batch: why RL columns ride in a plain class."""

import dataclasses

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision

from rlobjectives import PaddedLayout
from rlobjectives.integrations.lightning import Experience


@dataclasses.dataclass(frozen=True)
class Frozen:
    logprobs: torch.Tensor


def make_experience():
    ids = torch.tensor([[1, 2, 3]])
    mask = torch.tensor([[False, True, True]])
    logprobs = torch.full((1, 3), -10.03)
    return Experience(
        input_ids=ids, attention_mask=mask, layout=PaddedLayout(mask), behavior_logprobs=logprobs
    )


def test_frozen_dataclasses_are_refused():
    with pytest.raises(MisconfigurationException, match="frozen"):
        move_data_to_device({"batch": Frozen(torch.zeros(1))}, torch.device("cpu"))


@pytest.mark.parametrize(
    "plugin", [DeepSpeedPrecision("bf16-true"), DeepSpeedPrecision("bf16-mixed"), HalfPrecision("bf16-true")]
)
def test_float_tensors_are_cast_and_an_opaque_class_is_not(plugin):
    batch = {"old_logprobs": torch.tensor([-10.03]), "experience": make_experience()}
    cast = plugin.convert_input(batch)
    assert cast["old_logprobs"].dtype is torch.bfloat16
    ratio = float((torch.tensor(-10.03) - cast["old_logprobs"].float()).exp())
    assert abs(ratio - 1.0) > 0.02  # the silent error
    assert cast["experience"].behavior_logprobs.dtype is torch.float32


def test_an_opaque_class_is_moved():
    moved = move_data_to_device({"experience": make_experience()}, torch.device("meta"))
    assert moved["experience"].input_ids.device.type == "meta"
