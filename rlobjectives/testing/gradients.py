"""Laws about losses: the slope is the derivative, nothing else gets a gradient, nothing waits for the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.errors import WindowError
from rlobjectives.testing.compare import LawError, require
from rlobjectives.testing.examples import Example
from rlobjectives.testing.forbidden import no_host_sync, surviving_token_tensors
from rlobjectives.testing.subject import Subject, open_window
from rlobjectives.token_parts import TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["backward_once", "gradient", "memory", "no_wait", "slope"]

_STEP = 1e-6
_RELATIVE, _ABSOLUTE = 1e-7, 1e-8


def slope(subject: Subject, example: Example) -> None:
    """The slope against differences of the value, at every token that counts."""
    case = subject.draw(example)
    window, _, tokens = open_window(subject.fresh(), case, replace(example.shard, garbage=None))
    for scope, term in window.objective.token_terms().items():
        if scope not in subject.terms or term.straight_through:
            continue
        context = window.context(scope)
        found = term.value_and_slope(tokens, context)
        for column, given in {"logprobs": found.slope, **found.slopes}.items():
            _check_slope(term, tokens, context, column, given)


def _check_slope(
    term: TokenTerm, tokens: TokenBatch, context: WindowContext, column: str, given: Tensor
) -> None:
    values = tokens.need(column, "a law")

    def total(moved: Tensor) -> float:
        value = term.value_and_slope(tokens.replace(**{column: moved}), context).value
        return float(tokens.layout.select(value).sum())

    for place in map(tuple, tokens.layout.mask.nonzero().tolist()):
        step = torch.zeros_like(values)
        step[place] = _STEP
        exact = (total(values + step) - total(values - step)) / (2 * _STEP)
        own = float(given[place])
        if abs(own - exact) <= max(_RELATIVE * abs(exact), _ABSOLUTE):
            continue
        turned = " It has the wrong sign." if abs(own + exact) <= 1e-6 * abs(exact) else ""
        raise LawError(
            f"the slope of {type(term).__name__} in {column} is {own:.6g} at token {place}, and the derivative of its "
            f"value {exact:.6g}.{turned} If it differs on purpose (a stop-gradient), set straight_through = True."
        )


def gradient(subject: Subject, example: Example) -> None:
    """The gradient is weight times slope, and goes to no other column."""
    window, _, tokens = open_window(subject.fresh(), subject.draw(example))
    objective = window.objective
    columns = {
        column: value.detach().clone().requires_grad_()
        for column in (*subject.draw(example).columns, "advantages")
        if isinstance(value := tokens.get(column), Tensor)
    }
    window.loss(tokens.replace(**columns)).loss.backward()
    still = tokens.detach()
    terms = [
        term.value_and_slope(still, window.context(scope)) for scope, term in objective.token_terms().items()
    ]
    weights = window.weights(tokens.layout)
    expected = {}
    if not objective.corrections() and not objective.shapings():  # those change the weights or the advantages
        expected["logprobs"] = torch.stack([term.slope for term in terms]).sum(0) * weights
    if objective.entropy_coef:
        expected["entropy"] = -objective.entropy_coef * weights
    for column, gradient in expected.items():
        found = columns[column].grad
        same = found is not None and torch.allclose(found, tokens.layout.select(gradient), rtol=1e-12, atol=0)
        require(same, f"the gradient of {column} is not its slope times the weight of the token")
    reached = {column for column, leaf in columns.items() if leaf.grad is not None}
    allowed = {"logprobs", *expected, *(column for term in terms for column in term.slopes)}
    require(reached == allowed, f"{sorted(reached)} get a gradient; expected {sorted(allowed)}")


def backward_once(subject: Subject, example: Example) -> None:
    """A second backward through one loss is refused."""
    case = subject.draw(example)
    leaf = case.columns["logprobs"].clone().requires_grad_()
    window, _, tokens = open_window(subject.fresh(), case.replaced(logprobs=leaf))
    loss = window.loss(tokens).loss
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except WindowError:
        return
    raise LawError("a second backward through one loss adds its gradient again")


def memory(subject: Subject, example: Example) -> None:
    """Between loss and backward, one tensor of the tokens' size stays; with an entropy bonus, two."""
    case = subject.draw(example)
    leaf = case.columns["logprobs"].clone().requires_grad_()
    entropy = case.columns["entropy"].clone().requires_grad_()
    window, _, tokens = open_window(subject.fresh(), case.replaced(logprobs=leaf, entropy=entropy))
    _, survivors = surviving_token_tensors(
        lambda: window.loss(tokens), tokens.layout.mask.numel(), keep=lambda found: found.loss
    )
    expected = [tokens.logprobs.dtype] * (2 if window.objective.entropy_coef else 1)
    require(survivors == expected, f"{len(survivors)} tensors of the tokens' size stay alive: {survivors}")


def no_wait(subject: Subject, example: Example) -> None:
    """No look at the device from the estimate to the end of backward."""
    objective, case = subject.fresh(), subject.draw(example)
    shard = replace(example.shard, garbage=None)
    rollouts = case.rollouts(shard=shard)
    window, estimate, tokens = open_window(objective, case, shard)
    tokens = tokens.replace(logprobs=tokens.logprobs.clone().requires_grad_())
    if not objective.estimator.waits_for_device:
        with no_host_sync():
            estimate = objective.estimator.estimate(rollouts)
    with no_host_sync():
        objective.estimator.statistics(estimate, tokens.layout)
        objective.reduction.statistics(tokens.layout)
        advantages = window.advantages(estimate, tokens.layout)
        window.weights(tokens.layout)
        window.loss(tokens.replace(advantages=advantages)).loss.backward()
