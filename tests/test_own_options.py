"""Options of parts of one's own: checked whatever else a dataclass carries."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import CapabilityError, Estimator, PolicyLoss, Rollouts, TokenBatch
from rlobjectives.estimators.weights import RewardWeights


@dataclass(frozen=True, kw_only=True)
class Derived(PolicyLoss):
    """A flag, an argument that is no option, and a text that the part sets itself."""

    strict: bool = False
    percent: InitVar[float] = 50.0
    label: str = field(init=False)

    def __post_init__(self, percent: float) -> None:
        object.__setattr__(self, "label", f"{percent:g} %")

    def value(self, tokens: TokenBatch, context: Any) -> Tensor:
        return -tokens.logprobs


@dataclass(frozen=True, kw_only=True)
class Bare(PolicyLoss):
    """No check of its own."""

    strict: bool = False
    percent: InitVar[float] = 50.0

    def value(self, tokens: TokenBatch, context: Any) -> Tensor:
        return -tokens.logprobs


@dataclass(frozen=True, kw_only=True)
class Weighted(RewardWeights, Estimator):
    """No check of its own beside that of the weights."""

    strict: bool = False

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(rollouts.num_sequences)


def test_arguments_and_fields_that_are_no_options() -> None:
    assert Derived(percent=20.0).label == "20 %"
    assert Bare(percent=20.0) == Bare()


@pytest.mark.parametrize("kind", [Derived, Bare, Weighted])
def test_flags_are_checked_in_parts_of_any_make(kind: Any) -> None:
    assert kind(strict=True).strict
    with pytest.raises(CapabilityError, match=f"strict of {kind.__name__} is 'no'"):
        kind(strict="no")
