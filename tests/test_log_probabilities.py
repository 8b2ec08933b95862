"""Log-probabilities above 0: an error on all ranks, wherever they come in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlobjectives import (
    GRPO,
    P3O,
    ImportanceCorrection,
    KLPenalty,
    NonFiniteError,
    Objective,
    PaddedLayout,
    ReverseKLDistillation,
    Rollouts,
    TokenBatch,
)
from rlobjectives.testing.simulate import run_ranks_as_threads

COLUMNS = ("logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs", "teacher_logprobs")
READS_ALL = Objective(
    estimator=GRPO(),
    kl=KLPenalty(),
    correction=ImportanceCorrection(),
    distillation=ReverseKLDistillation(),
)
LAYOUT = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))
ESTIMATE = torch.tensor([1.0, -1.0], dtype=torch.float64)


def batch(dtype: torch.dtype = torch.float64, **wrong: float) -> TokenBatch:
    """Log-probabilities of −1, with one wrong number in a column."""
    columns = {name: torch.full(LAYOUT.shape, -1.0, dtype=dtype) for name in COLUMNS}
    for name, value in wrong.items():
        columns[name][0, 1] = value
    columns["logprobs"].requires_grad_()
    return TokenBatch(layout=LAYOUT, **columns)


def lose(tokens: TokenBatch, communicator: Any = None) -> Any:
    window = READS_ALL.freeze([(ESTIMATE, LAYOUT)], communicator)
    output = window.loss(tokens.replace(advantages=window.advantages(ESTIMATE, LAYOUT)))
    output.loss.backward()
    return window.summarize([output])


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("value", [5.0, 0.7, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_in_a_loss_is_an_error_on_every_rank(name: str, value: float, dtype: torch.dtype) -> None:
    def one(communicator: Any) -> Any:
        return lose(batch(dtype, **({name: value} if communicator.rank == 1 else {})), communicator)

    for error in run_ranks_as_threads(one, 2):
        assert isinstance(error, NonFiniteError)
        assert f"rank 1, micro-batch 0: {name} has 1 values above 0 among 3 that count" in str(error)
        assert "log_softmax" in str(error) and "Raised on all 2 ranks" in str(error)


@pytest.mark.parametrize("name", COLUMNS)
def test_one_before_the_losses_is_found_by_freeze(name: str) -> None:
    objective = Objective(estimator=GRPO(), policy_loss=P3O(), kl=KLPenalty())
    builder = objective.window()
    builder.add(estimate=ESTIMATE, layout=LAYOUT)
    builder.add_prepass(batch(**{name: 5.0}))
    with pytest.raises(NonFiniteError, match=f"{name} has 1 values above 0 among 3"):
        builder.freeze()


@pytest.mark.parametrize("name", COLUMNS[1:])
def test_one_in_the_rollouts(name: str) -> None:
    column = torch.full(LAYOUT.shape, -1.0)
    column[0, 0] = 5.0
    data = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([3, 3]), "layout": LAYOUT}
    with pytest.raises(NonFiniteError, match=f"{name} has 1 values above 0 among 3"):
        Rollouts(**data, **{name: column})
    column[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=f"{name} has 1 non-finite values among 3"):
        Rollouts(**data, **{name: column})


def test_probabilities_are_not_taken_for_their_logarithms() -> None:
    tokens = batch()
    with pytest.raises(NonFiniteError, match="logprobs has 3 values above 0 among 3"):
        lose(tokens.replace(logprobs=tokens.logprobs.detach().exp().requires_grad_()))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1e-6, torch.float32), (4e-3, torch.float32), (1e-6, torch.float64), (8e-3, torch.bfloat16)],
)
def test_rounding_is_let_through(name: str, value: float, dtype: torch.dtype) -> None:
    lose(batch(dtype, **{name: value}))


@pytest.mark.parametrize("name", COLUMNS)
def test_masked_places_may_hold_anything(name: str) -> None:
    tokens = batch()
    column = getattr(tokens, name).detach().clone()
    column[~LAYOUT.mask] = 5.0
    lose(tokens.replace(**{name: column.requires_grad_(name == "logprobs")}))


def test_what_is_not_finite_is_told_apart() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(NonFiniteError, match="old_logprobs has 1 non-finite values among 3"):
            lose(batch(old_logprobs=bad))
