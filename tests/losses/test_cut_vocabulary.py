"""Vocabulary entries that neither policy can give (−∞ logits): as if they were cut off, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import DivergenceDistillation, Objective, PaddedLayout, TokenBatch
from rlobjectives.functional import topk_divergence, vocabulary_divergence
from rlobjectives.logprobs import token_logprobs
from tests.losses.offpolicy import Given

INF = math.inf
STUDENT, TEACHER = [1.0, 0.0, -INF], [0.2, 0.4, -INF]
ONE = PaddedLayout(torch.tensor([[True]]))
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-15}
every_beta = pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.9, 1.0])


def plain(student: list[float], teacher: list[float], beta: float) -> float:
    """Σ over what is possible, in plain Python."""

    def softmax(logits: list[float]) -> list[float]:
        weights = [math.exp(x) for x in logits]
        return [w / sum(weights) for w in weights]

    def kl(p: list[float], q: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0.0)

    s, t = softmax(student), softmax(teacher)
    m = [beta * b + (1.0 - beta) * a for a, b in zip(s, t)]
    return kl(t, s) if beta == 0.0 else kl(s, t) if beta == 1.0 else beta * kl(t, m) + (1.0 - beta) * kl(s, m)


def slopes(student: list[float], teacher: list[float], beta: float, step: float = 1e-6) -> list[float]:
    """Central differences of `plain`; 0 where a logit is −∞."""
    found = []
    for place, logit in enumerate(student):
        if logit == -INF:
            found.append(0.0)
            continue
        up, down = ([*student[:place], logit + d, *student[place + 1 :]] for d in (step, -step))
        found.append((plain(up, teacher, beta) - plain(down, teacher, beta)) / (2.0 * step))
    return found


def tensor(*rows: list[float], grad: bool = False) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64, requires_grad=grad)


def test_the_reported_number() -> None:
    student = tensor(STUDENT, grad=True)
    found = vocabulary_divergence(student, tensor(TEACHER), ONE, beta=0.5)
    assert found.item() == pytest.approx(0.041447329706129396, rel=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    expected = [0.062277112196007345, -0.06227711219600734, 0.0]
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-12)


@every_beta
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (STUDENT, TEACHER),
        ([1.0, 0.0, -INF], [-INF, 0.4, -INF]),  # possible for the student alone
        ([-INF, 0.0, 2.0, -INF], [0.2, 0.4, 0.1, -INF]),  # possible for the teacher alone
        ([0.0, -INF, -INF], [1.0, -INF, -INF]),  # one entry is certain
    ],
)
def test_the_plain_formula(student: list[float], teacher: list[float], beta: float) -> None:
    impossible = [-INF]
    one_sided = (
        beta == 0.0 and any(s in impossible and t not in impossible for s, t in zip(student, teacher))
    ) or (beta == 1.0 and any(t in impossible and s not in impossible for s, t in zip(student, teacher)))
    leaf = tensor(student, grad=True)
    found = vocabulary_divergence(leaf, tensor(teacher), ONE, beta=beta)
    if one_sided:  # infinite by its definition, and said to be
        assert found.item() == INF
        return
    assert found.item() == pytest.approx(plain(student, teacher, beta), rel=1e-12, abs=1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert gradient.flatten().tolist() == pytest.approx(slopes(student, teacher, beta), abs=1e-8)


@every_beta
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_the_columns_cut_off(beta: float, temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layout = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))
    student, teacher = (torch.randn(2, 3, 7, dtype=dtype) for _ in range(2))
    student[..., 4:], teacher[..., 4:] = -INF, -INF
    whole, short = student.clone().requires_grad_(), student[..., :4].clone().requires_grad_()
    found = vocabulary_divergence(whole, teacher, layout, beta=beta, temperature=temperature)
    other = vocabulary_divergence(short, teacher[..., :4], layout, beta=beta, temperature=temperature)
    torch.testing.assert_close(found, other)
    found.sum().backward()
    other.sum().backward()
    assert whole.grad is not None and short.grad is not None
    torch.testing.assert_close(whole.grad[..., :4], short.grad)
    assert torch.count_nonzero(whole.grad[..., 4:]) == 0


@every_beta
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_top_k_places_that_are_unused(beta: float, tail: Any) -> None:
    torch.manual_seed(4)
    layout = PaddedLayout(torch.tensor([[True, True, False]]))
    logits = torch.randn(1, 3, 9, dtype=torch.float64)
    teacher = torch.randn(1, 3, 9, dtype=torch.float64).log_softmax(-1)[..., :5].clone()
    teacher[..., 3:] = -INF
    whole, short = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    student = whole.log_softmax(-1)[..., :5]
    student = torch.where(torch.isneginf(teacher), -INF, student)  # as a gather of unused ids may give it
    found = topk_divergence(student, teacher, layout, beta=beta, tail=tail)
    other = topk_divergence(short.log_softmax(-1)[..., :3], teacher[..., :3], layout, beta=beta, tail=tail)
    torch.testing.assert_close(found, other, **CLOSE)
    found.sum().backward()
    other.sum().backward()
    assert whole.grad is not None and short.grad is not None
    torch.testing.assert_close(whole.grad, short.grad, rtol=1e-12, atol=1e-14)


@every_beta
def test_a_step_leaves_every_weight_finite(beta: float) -> None:
    """Forward, backward, step: the weights are what is looked at."""
    torch.manual_seed(5)
    head = torch.nn.Linear(4, 6, dtype=torch.float64)
    before = head.weight.detach().clone()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    states, ids = torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(4, (2, 3))
    layout = PaddedLayout(torch.tensor([[True, True, True], [True, False, False]]))
    forbidden = torch.tensor([False] * 4 + [True] * 2)
    teacher = torch.where(forbidden, -INF, torch.randn(2, 3, 6, dtype=torch.float64))
    objective = Objective(estimator=Given(), distillation=DivergenceDistillation(coef=0.5), entropy_coef=0.01)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    window = objective.freeze([(advantages, layout)])
    logits = torch.where(forbidden, -INF, head(states))
    logprobs, entropy = token_logprobs(logits, ids, mask=layout.mask, entropy=True)
    tokens = TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        layout=layout,
        advantages=window.advantages(advantages, layout),
        teacher_logprobs=logprobs.detach(),
        teacher_divergence=vocabulary_divergence(logits, teacher, layout, beta=beta),
    )
    output = window.loss(tokens)
    output.loss.backward()
    window.summarize([output])
    optimizer.step()
    assert torch.isfinite(head.weight).all() and torch.isfinite(head.bias).all()
    assert not torch.equal(head.weight, before)


def test_entropy_and_its_gradient() -> None:
    whole, short = tensor(STUDENT, grad=True), tensor(STUDENT[:2], grad=True)
    for leaf in (whole, short):
        logprobs, entropy = token_logprobs(leaf, torch.tensor([[0]]), entropy=True)
        assert entropy is not None
        (logprobs + 2.0 * entropy).sum().backward()
    assert whole.grad is not None and short.grad is not None
    torch.testing.assert_close(whole.grad[..., :2], short.grad, **CLOSE)
    assert whole.grad[..., 2].item() == 0.0
