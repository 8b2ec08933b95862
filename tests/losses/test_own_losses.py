"""Losses that users write: a value without a graph trains nothing, and a column that is None has a name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import (
    CapabilityError,
    KLPenalty,
    MissingColumnError,
    Objective,
    PolicyLoss,
    RLObjectivesError,
    TokenLoss,
)
from rlobjectives.functional import token_ratio
from rlobjectives.terms.distillation import Distillation
from rlobjectives.token_parts import TokenTerm
from tests.losses.offpolicy import Data, Given, single


class Detached(PolicyLoss):
    """A ratio that was made without gradient."""

    def value(self, tokens: Any, context: Any) -> Tensor:
        return -tokens.advantages * token_ratio(tokens).value


class Written(PolicyLoss):
    """The same by hand."""

    def value(self, tokens: Any, context: Any) -> Tensor:
        return -tokens.advantages * (tokens.logprobs - tokens.old()).exp()


class Cut(PolicyLoss):
    """The whole value detached."""

    def value(self, tokens: Any, context: Any) -> Tensor:
        return Written().value(tokens, context).detach()


class Constant(PolicyLoss):
    """The same number everywhere."""

    def value(self, tokens: Any, context: Any) -> Tensor:
        return torch.full_like(tokens.logprobs.detach(), 2.0)


class Weights(PolicyLoss):
    """A graph, but to something else."""

    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def value(self, tokens: Any, context: Any) -> Tensor:
        return -tokens.advantages * self.scale


@pytest.mark.parametrize("kind", [Detached, Cut, Constant, Weights])
def test_a_value_that_does_not_depend_on_the_log_probabilities(kind: type) -> None:
    data, objective = Data.random([3, 1]), Objective(estimator=Given(), policy_loss=kind())
    with pytest.raises(
        CapabilityError, match=rf"{kind.__name__}\.value\(\) does not depend on tokens\.logprobs"
    ) as caught:
        single(objective, data)
    assert str(caught.value).startswith("4 of ")


def test_the_same_by_hand_has_its_gradient() -> None:
    data = Data.of([-1.0], logprobs=[[-1.0 + math.log(0.7)]], old_logprobs=[[-1.0]])
    found = single(Objective(estimator=Given(), policy_loss=Written()), data)
    assert found.gradient.item() == pytest.approx(0.7, rel=1e-12)


@pytest.mark.parametrize("kind", [Detached, Cut, Constant, Weights])
def test_where_there_is_nothing_to_learn_it_is_no_fault(kind: type) -> None:
    objective, data = Objective(estimator=Given(), policy_loss=kind()), Data.random([3, 2])
    still = Data(data.mask, torch.zeros_like(data.advantages), data.columns)
    assert not single(objective, still).gradient.any()
    masked = Data(torch.zeros_like(data.mask), data.advantages, data.columns)
    assert not single(objective, masked).gradient.any()
    part = Data(data.mask & torch.tensor([[False], [True]]), torch.tensor([1.0, 0.0]).double(), data.columns)
    assert not single(objective, part).gradient.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_needs_no_graph(mode: Any) -> None:
    data = Data.random([3, 2])
    layout = data.layout()
    window = Objective(estimator=Given(), policy_loss=Detached()).freeze([(data.advantages, layout)])
    with mode():
        advantages = window.advantages(data.advantages, layout)
        tokens = data.tokens(layout, data.columns["logprobs"], advantages=advantages)
        assert math.isfinite(float(window.loss(tokens).loss))


class OwnKL(KLPenalty):
    """A penalty of a user's own, without its graph."""

    value_and_slope = TokenTerm.value_and_slope

    def value(self, tokens: Any, context: Any) -> Tensor:
        return self.coef * (tokens.logprobs.detach() - tokens.ref_logprobs).square()


class OwnTeacher(Distillation, TokenTerm):
    """An extra term of a user's own, without its graph."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def value(self, tokens: Any, context: Any) -> Tensor:
        return self.coef * (tokens.logprobs.detach() - tokens.teacher_logprobs).square()


@pytest.mark.parametrize(
    ("role", "part", "still"),
    [("kl", OwnKL(coef=0.1), OwnKL(coef=0.0)), ("distillation", OwnTeacher(0.1), OwnTeacher(0.0))],
)
def test_terms_beside_the_policy_loss(role: str, part: Any, still: Any) -> None:
    data = Data.random([3, 2])
    with pytest.raises(CapabilityError, match=rf"{type(part).__name__}\.value\(\) does not depend"):
        single(Objective(estimator=Given(), **{role: part}), data)
    single(Objective(estimator=Given(), **{role: still}), data)  # adds nothing, and means it


class OldByName(PolicyLoss):
    """Reads the column, which is None while the policy has not moved."""

    def value(self, tokens: Any, context: Any) -> Tensor:
        return -tokens.advantages * (tokens.logprobs - tokens.old_logprobs).exp()


class EntropyByName(PolicyLoss):
    """Calls a method of a column that is not there."""

    def value_and_slope(self, tokens: Any, context: Any) -> TokenLoss:
        return TokenLoss(tokens.entropy.square(), tokens.logprobs)


def test_a_column_that_is_none_is_named() -> None:
    data = Data.random([3, 2])
    assert torch.isfinite(single(Objective(estimator=Given(), policy_loss=OldByName()), data).gradient).all()
    for part, words in (
        (OldByName(), r"OldByName .* tokens\.old\(\)"),
        (EntropyByName(), "carries no .*entropy"),
    ):
        objective = Objective(estimator=Given(), policy_loss=part)
        with pytest.raises(MissingColumnError, match=words) as caught:
            fresh = Data(data.mask, data.advantages, {"logprobs": data.columns["logprobs"]})
            single(objective, fresh)
        assert isinstance(caught.value.__cause__, (TypeError, AttributeError))


def test_an_error_of_another_kind_is_left_alone() -> None:
    class Wrong(PolicyLoss):
        def value(self, tokens: Any, context: Any) -> Tensor:
            return tokens.logprobs + "one"

    with pytest.raises(TypeError) as caught:
        single(Objective(estimator=Given(), policy_loss=Wrong()), Data.random([3, 2]))
    assert not isinstance(caught.value, RLObjectivesError)


class Slopes(PolicyLoss):
    """A slope in a column that has none, or of another shape, or not finite."""

    def __init__(self, name: str, slope: Any) -> None:
        self.name, self.slope = name, slope

    def value_and_slope(self, tokens: Any, context: Any) -> TokenLoss:
        zero = torch.zeros_like(tokens.logprobs)
        return TokenLoss(zero, zero, {}, {self.name: self.slope(zero)})


COLUMNS = ("entropy", "values", "ref_kl", "behavior_kl", "teacher_divergence")


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_slope_that_is_not_finite_is_reported_in_every_column(name: str, bad: float) -> None:
    data = Data.random([3, 2])
    objective = Objective(estimator=Given(), policy_loss=Slopes(name, lambda zero: zero + bad))
    column = torch.ones(data.mask.shape, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RLObjectivesError, match=f"slope in {name} has 5 non-finite values among 5"):
        single(objective, data, **{name: column})


def test_slopes_are_of_differentiable_columns_and_shaped_like_the_mask() -> None:
    data = Data.random([3, 2])
    for name, slope, words in (
        ("advantages", lambda zero: zero, "slopes is 'advantages'; expected one of 'entropy'"),
        ("entropy", lambda zero: zero[:, :1], r"Slopes slopes\['entropy'\] has shape"),
    ):
        with pytest.raises(RLObjectivesError, match=words):
            single(
                Objective(estimator=Given(), policy_loss=Slopes(name, slope)),
                data,
                entropy=data.mask.double(),
            )
