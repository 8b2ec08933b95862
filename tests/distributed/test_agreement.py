"""What ranks must have alike is compared in one exchange, and what differs is named with its values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlobjectives import (
    GDPO,
    GRPO,
    M2PO,
    P3O,
    Communicator,
    ImportanceCorrection,
    KLCov,
    Objective,
    PaddedLayout,
    PolicyLoss,
    RankError,
    Rejection,
    TokenBatch,
    TokenLoss,
    check_agreement,
)
from tests.ranks import run_ranks

MASK = torch.ones(4, 3, dtype=torch.bool)


class Capped(PolicyLoss):
    """A user's loss that is no dataclass."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def value_and_slope(self, tokens: TokenBatch, context: Any) -> TokenLoss:
        return TokenLoss(-self.cap * tokens.logprobs, torch.full_like(tokens.logprobs, -self.cap))


class Counting(Communicator):
    """Counts the messages that really travel."""

    messages = 0

    def gather(self, row: Tensor) -> Tensor:
        self.messages += 1
        return super().gather(row)


def compare(*options: dict[str, object]) -> int:
    """Each rank its own options; the number of messages."""
    communicator = Counting(dist.group.WORLD)
    check_agreement(options[communicator.rank], communicator)
    return communicator.messages


def test_options_that_agree_cost_one_message() -> None:
    same = {"learning_rate": 1e-6, "betas": (0.9, 0.95), "seed": None}
    assert run_ranks(compare, 2, same, dict(same)) == [1, 1]


def test_every_option_that_differs_is_named_with_its_values_on_all_ranks() -> None:
    first = {"learning_rate": 1e-6, "epochs": 2, "seed": 1}
    second = {"learning_rate": 2e-6, "epochs": 2, "extra": True}
    for error in run_ranks(compare, 3, first, second, first, expect_errors=True):
        assert isinstance(error, RankError)
        assert "ranks were given different options (ranks 0, 2 / rank 1): " in str(error)
        assert "learning_rate is 1e-06 on ranks 0, 2, and 2e-06 on rank 1" in str(error)
        assert "extra is absent on ranks 0, 2, and True on rank 1" in str(error)
        assert "seed is 1 on ranks 0, 2, and absent on rank 1" in str(error)
        assert "epochs" not in str(error)
        assert "Raised on all 3 ranks." in str(error)


def test_of_a_long_option_the_place_that_differs_is_shown() -> None:
    first, second = ({"rows": "x" * 5000 + tail + "y" * 5000} for tail in ("one", "two"))
    (error, _) = run_ranks(compare, 2, first, second, expect_errors=True)
    assert "xxone" in str(error)
    assert "xxtwo" in str(error)
    assert len(str(error)) < 1500


DIFFERENT = {
    "a plain class": [Objective(estimator=GRPO(), policy_loss=Capped(cap)) for cap in (0.9, 0.1)],
    "an option of a nested part": [
        Objective(estimator=GRPO(), correction=ImportanceCorrection(reject=(Rejection(low=low),)))
        for low in (0.5, 0.25)
    ],
    "the entropy bonus": [Objective(estimator=GRPO(), entropy_coef=coef) for coef in (0.0, 0.01)],
}


def freeze_different(name: str) -> None:
    objective = DIFFERENT[name][dist.get_rank()]
    builder = objective.window()
    builder.add(estimate=torch.ones(4, dtype=torch.float64), layout=PaddedLayout(MASK))
    builder.freeze()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a plain class", "policy_loss is Capped(cap=0.9) on rank 0, and Capped(cap=0.1) on rank 1"),
        ("an option of a nested part", "low=0.5"),
        ("the entropy bonus", "entropy_coef is absent on rank 0, and 0.01 on rank 1"),
    ],
)
def test_ranks_whose_objectives_differ_are_refused_before_their_first_loss(name: str, words: str) -> None:
    for error in run_ranks(freeze_different, 2, name, expect_errors=True):
        assert isinstance(error, RankError)
        assert words in str(error)


OBJECTIVES = {
    "grpo": Objective.named("grpo"),
    "gdpo": Objective.named("gdpo"),
    "p3o": Objective(estimator=GDPO(), policy_loss=P3O()),
    "m2po": Objective.named("m2po"),
    "m2po after gdpo": Objective(estimator=GDPO(), policy_loss=M2PO()),
    "dapo_entropy": Objective.named("dapo_entropy"),
    "kl_cov": Objective(estimator=GRPO(), policy_loss=KLCov()),
    "kl_cov after gdpo": Objective(estimator=GDPO(), policy_loss=KLCov()),
}


def exchanges(name: str) -> tuple[int, int]:
    """Messages to open a window, and to report it; with every warning an error."""
    objective, communicator = OBJECTIVES[name], Counting(dist.group.WORLD)
    generator = torch.Generator().manual_seed(dist.get_rank())
    column = -torch.rand(4, 3, generator=generator) - 0.5
    layout = PaddedLayout(MASK)
    estimate = torch.rand(4, objective.estimator.columns, generator=generator).double().squeeze(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        builder = objective.window(communicator)
        columns = {"logprobs": column, "old_logprobs": column - 0.1, "behavior_logprobs": column - 0.2}
        tokens = TokenBatch(layout=layout, entropy=column.abs(), **columns)
        builder.add(estimate=estimate, layout=layout)
        if objective.capabilities.needs_prepass:
            builder.add_prepass(tokens)
        window = builder.freeze()
        opened = communicator.messages
        output = window.loss(tokens.replace(advantages=window.advantages(estimate, layout)))
        window.summarize([output])
    return opened, communicator.messages - opened


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("grpo", 1),
        ("gdpo", 1),
        ("p3o", 1),
        ("m2po", 3),
        ("m2po after gdpo", 4),
        ("dapo_entropy", 3),
        ("kl_cov", 4),
        ("kl_cov after gdpo", 5),
    ],
)
def test_messages_of_a_step_without_any_warning(name: str, opening: int) -> None:
    assert run_ranks(exchanges, 2, name) == [(opening, 1)] * 2
