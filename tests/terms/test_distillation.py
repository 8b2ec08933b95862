"""Distillation: published numbers, gradients, divergences against torch, missing teachers."""

from __future__ import annotations

import math

import pytest
import torch

from rlobjectives import (
    M2PO,
    CapabilityError,
    DivergenceDistillation,
    MissingColumnError,
    NonFiniteError,
    Objective,
    PaddedLayout,
    Reinforce,
    ReverseKLDistillation,
    ShapeError,
)
from rlobjectives.functional import topk_divergence, vocabulary_divergence
from tests.corrections.test_importance import fixture
from tests.losses.offpolicy import Data, Given, run, single

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
STUDENT, TEACHER = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
PUBLISHED = {0.0: 0.092032850234, 1.0: 0.085122825957, 0.5: 0.021901178968, 0.1: 0.008184755843}


def with_teacher() -> Data:
    data = fixture()
    data.columns["teacher_logprobs"] = torch.tensor(
        [[-0.9, -1.5, -0.6], [-0.8, -1.3, float("nan")]], dtype=torch.float64
    )
    return data


def objective(**options) -> Objective:
    return Objective(
        estimator=Given(), policy_loss=Reinforce(), distillation=ReverseKLDistillation(**options)
    )


def test_published_advantages():
    result = single(objective(coef=0.5), with_teacher())
    expected = [1.15, 1.6, 1.1, -0.7, -0.9]
    assert (-result.gradient[:5] * 5).tolist() == pytest.approx(expected, abs=1e-12)
    x = [0.1, -0.8, 0.2, -0.2, 0.2]
    assert result.metrics["distillation/reverse_kl"] == pytest.approx(sum(x) / 5)
    pure = single(objective(coef=0.5, replace=True), with_teacher())
    assert (-pure.gradient[:5] * 5).tolist() == pytest.approx([-0.5 * one for one in x], abs=1e-12)


def test_its_expected_gradient_is_that_of_the_reverse_divergence():
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    mask = torch.ones(7, 1, dtype=torch.bool)
    data = Data(
        mask,
        torch.zeros(7, dtype=torch.float64),
        {"logprobs": student.detach()[:, None], "teacher_logprobs": teacher[:, None]},
    )
    slopes = single(objective(), data).gradient * 7  # one sample of every token
    (sampled,) = torch.autograd.grad((student.exp().detach() * slopes * student).sum(), logits)
    torch.testing.assert_close(sampled, exact, **CLOSE)


def test_a_loss_that_looks_at_advantages_in_its_pre_pass_sees_the_teacher():
    data = Data.random([4, 1, 3, 6], seed=1, spread=0.5)
    part = Objective(
        estimator=Given(), policy_loss=M2PO(budget=0.05), distillation=ReverseKLDistillation(coef=2.0)
    )
    whole = single(part, data)
    pieces = run(part, [data.rows([0, 1]), data.rows([2, 3])])
    torch.testing.assert_close(pieces.gradient, whole.gradient, **CLOSE)
    # By hand: the same advantages, one per token, given to M2PO alone.
    x = (data.columns["logprobs"] - data.columns["teacher_logprobs"])[data.mask]
    flat = data.advantages[:, None].expand(data.mask.shape)[data.mask] - 2.0 * x
    columns = {name: column[data.mask][:, None] for name, column in data.columns.items()}
    single_tokens = Data(torch.ones(14, 1, dtype=torch.bool), flat, columns)
    expected = single(Objective(estimator=Given(), policy_loss=M2PO(budget=0.05)), single_tokens)
    torch.testing.assert_close(whole.gradient[data.mask.flatten()], expected.gradient, **CLOSE)


class TestMissingTeacher:
    def test_no_column(self):
        with pytest.raises(MissingColumnError, match="teacher_logprobs"):
            single(objective(), fixture())
        with pytest.raises(MissingColumnError, match="teacher_divergence"):
            single(Objective(estimator=Given(), distillation=DivergenceDistillation()), fixture())

    def test_an_unknown_row_is_an_error(self):
        known = torch.tensor([[True] * 3, [False] * 3])
        with pytest.raises(NonFiniteError, match="teacher_logprobs has 2 non-finite"):
            single(objective(), with_teacher(), teacher_known=known)

    def test_skipped_rows_keep_their_advantage(self):
        known = torch.tensor([[True] * 3, [False] * 3])
        data = with_teacher()
        data.columns["teacher_logprobs"][1] = float("nan")
        result = single(objective(coef=0.5, missing="skip"), data, teacher_known=known)
        assert (-result.gradient[:5] * 5).tolist() == pytest.approx([1.15, 1.6, 1.1, -0.8, -0.8], abs=1e-12)
        replaced = single(objective(replace=True, missing="skip"), data, teacher_known=known)
        assert replaced.gradient[3:].tolist() == [0.0, 0.0, 0.0]

    def test_top_k_row_without_values(self):
        data = fixture()
        layout = data.layout()
        student = torch.log(torch.full((2, 3, 2), 0.3, dtype=torch.float64)).requires_grad_()
        teacher = torch.log(torch.full((2, 3, 2), 0.4, dtype=torch.float64))
        teacher[0, 1] = -torch.inf
        column = topk_divergence(student, teacher, layout)
        part = Objective(estimator=Given(), distillation=DivergenceDistillation())
        with pytest.raises(NonFiniteError, match="teacher_divergence has 1 non-finite"):
            single(part, data, teacher_divergence=column)
        student.grad = None
        known = torch.ones(2, 3, dtype=torch.bool)
        known[0, 1] = False
        skip = Objective(estimator=Given(), distillation=DivergenceDistillation(missing="skip"))
        column = topk_divergence(student, teacher, layout)
        result = single(skip, data, teacher_divergence=column, teacher_known=known)
        assert math.isfinite(float(result.loss))
        assert torch.isfinite(student.grad).all()
        assert student.grad[0, 1].tolist() == [0.0, 0.0]
        assert student.grad[0, 0].abs().min() > 0


class TestDivergence:
    @pytest.mark.parametrize("beta", PUBLISHED)
    def test_published(self, beta):
        layout = PaddedLayout(torch.tensor([[True]]))
        student, teacher = (torch.tensor([[p]], dtype=torch.float64).log() for p in (STUDENT, TEACHER))
        found = vocabulary_divergence(student, teacher, layout, beta=beta)
        assert float(found) == pytest.approx(PUBLISHED[beta], abs=1e-12)
        whole = topk_divergence(student, teacher, layout, beta=beta, tail="renormalize")
        assert float(whole) == pytest.approx(PUBLISHED[beta], abs=1e-12)

    @pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
    @pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
    def test_value_and_gradient_equal_the_naive_formula(self, beta, temperature):
        torch.manual_seed(0)
        layout = Data.random([3, 2]).layout()
        student = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
        teacher = torch.randn(2, 3, 6, dtype=torch.float64)
        found = vocabulary_divergence(student, teacher, layout, beta=beta, temperature=temperature)
        s, t = (student / temperature).softmax(-1), (teacher / temperature).softmax(-1)
        m = beta * t + (1 - beta) * s

        def kl(p, q):
            return (p * (p.log() - q.log())).sum(-1)

        naive = kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)
        naive = torch.where(layout.mask, naive, 0.0)
        torch.testing.assert_close(found, naive, **CLOSE)
        (one,) = torch.autograd.grad(found.sum(), student, retain_graph=True)
        (other,) = torch.autograd.grad(naive.sum(), student)
        torch.testing.assert_close(one, other, **CLOSE)
        assert torch.autograd.gradcheck(
            lambda x: vocabulary_divergence(x, teacher, layout, beta=beta, temperature=temperature),
            (student,),
        )

    def test_masked_garbage_and_no_gradient_into_the_teacher(self):
        layout = Data.random([3, 2]).layout()
        student = torch.randn(2, 3, 6, dtype=torch.float64)
        teacher = torch.randn(2, 3, 6, dtype=torch.float64)
        clean = vocabulary_divergence(student, teacher, layout, beta=0.5)
        student[1, 2], teacher[1, 2] = float("nan"), float("inf")
        student.requires_grad_()
        teacher.requires_grad_()
        found = vocabulary_divergence(student, teacher, layout, beta=0.5)
        assert torch.equal(found, clean)
        found.sum().backward()
        assert torch.isfinite(student.grad).all()
        assert teacher.grad is None

    @pytest.mark.parametrize("gap", [100.0, -100.0, 1e4])
    @pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
    def test_extremes_are_finite(self, gap, beta):
        layout = PaddedLayout(torch.tensor([[True]]))
        student = torch.tensor([[[gap, 0.0, 1.0]]], requires_grad=True)
        found = vocabulary_divergence(student, torch.tensor([[[0.0, gap, 1.0]]]), layout, beta=beta)
        found.sum().backward()
        assert torch.isfinite(found).all()
        assert torch.isfinite(student.grad).all()

    def test_top_k_with_a_tail_bounds_the_whole_from_below(self):
        torch.manual_seed(0)
        layout = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
        student = torch.randn(2, 3, 9, dtype=torch.float64).log_softmax(-1)
        teacher = torch.randn(2, 3, 9, dtype=torch.float64).log_softmax(-1)
        whole = vocabulary_divergence(student, teacher, layout)
        top, index = teacher.topk(4, -1)
        previous = torch.zeros_like(whole)
        for k in (1, 2, 4):
            found = topk_divergence(student.gather(-1, index)[..., :k], top[..., :k], layout)
            assert (found <= whole + 1e-12).all()
            assert (found >= previous - 1e-12).all()
            previous = found
        full = topk_divergence(student, teacher, layout)
        torch.testing.assert_close(full, whole, rtol=1e-9, atol=1e-9)

    def test_unused_places_count_as_nothing(self):
        layout = PaddedLayout(torch.tensor([[True]]))
        student = torch.tensor([[[0.5, 0.3, 0.1]]], dtype=torch.float64).log().requires_grad_()
        teacher = torch.tensor([[[0.6, 0.2, 0.0]]], dtype=torch.float64).log()
        for tail in ("bucket", "renormalize"):
            found = topk_divergence(student, teacher, layout, tail=tail)
            short = topk_divergence(student[..., :2], teacher[..., :2], layout, tail=tail)
            torch.testing.assert_close(found, short, **CLOSE)
            (gradient,) = torch.autograd.grad(found.sum(), student, retain_graph=True)
            assert float(gradient[0, 0, 2]) == 0.0
            assert torch.isfinite(gradient).all()

    def test_top_k_gradient(self):
        layout = PaddedLayout(torch.ones(1, 2, dtype=torch.bool))
        logits = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)
        teacher = torch.randn(1, 2, 5, dtype=torch.float64).log_softmax(-1)[..., :3]
        for beta in (0.0, 0.5, 1.0):
            assert torch.autograd.gradcheck(
                lambda x, b=beta: topk_divergence(x.log_softmax(-1)[..., :3], teacher, layout, beta=b),
                (logits,),
            )

    def test_refusals(self):
        layout = PaddedLayout(torch.ones(1, 2, dtype=torch.bool))
        good = torch.zeros(1, 2, 3)
        with pytest.raises(ShapeError, match="teacher_logits"):
            vocabulary_divergence(good, torch.zeros(1, 2, 4), layout)
        with pytest.raises(CapabilityError, match="beta"):
            vocabulary_divergence(good, good, layout, beta=1.5)
        with pytest.raises(CapabilityError, match="temperature"):
            vocabulary_divergence(good, good, layout, temperature=0.0)
        with pytest.raises(CapabilityError, match="tail"):
            topk_divergence(good, good, layout, tail="drop")


def test_the_loss_form_is_weighted_by_the_window():
    data = Data.random([4, 1, 3, 6])
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 6, 5, dtype=torch.float64)
    part = Objective(estimator=Given(), distillation=DivergenceDistillation(coef=0.3))
    column = vocabulary_divergence(logits, teacher, data.layout(), beta=0.5)
    found = single(part, data, teacher_divergence=column)
    plain = single(Objective(estimator=Given()), data)
    expected = plain.loss + 0.3 * column.detach()[data.mask].mean()
    torch.testing.assert_close(found.loss, expected, **CLOSE)
    torch.testing.assert_close(found.gradient, plain.gradient, **CLOSE)
    again = vocabulary_divergence(logits, teacher, data.layout(), beta=0.5)
    (gradient,) = torch.autograd.grad(0.3 * again.sum() / 14, logits)
    torch.testing.assert_close(logits.grad, gradient, **CLOSE)
    assert found.metrics["distillation/divergence"] == pytest.approx(float(column.detach()[data.mask].mean()))


def test_against_trl():
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    labels = torch.where(mask, 1, -100)
    for beta in (0.0, 0.3, 1.0):
        theirs = trl.GKDTrainer.generalized_jsd_loss(
            student, teacher, labels=labels, beta=beta, temperature=0.7
        )
        ours = vocabulary_divergence(student, teacher, PaddedLayout(mask), beta=beta, temperature=0.7)
        assert float(ours.sum() / 5) == pytest.approx(float(theirs), rel=1e-10)


def test_options():
    for options in ({"coef": 0.0}, {"missing": "drop"}):
        with pytest.raises(CapabilityError, match=next(iter(options))):
            ReverseKLDistillation(**options)
    with pytest.raises(CapabilityError, match="coef"):
        DivergenceDistillation(coef=-1.0)
