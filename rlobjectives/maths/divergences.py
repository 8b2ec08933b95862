"""Divergences between two distributions over tokens, with gradient: whole vocabulary, or top k."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rlobjectives.checks import check_choice, check_floating, check_number, check_shape
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout
from rlobjectives.masking import select
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, clamp_around

__all__ = ["KL_ESTIMATORS", "kl_estimate", "topk_divergence", "vocabulary_divergence"]

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "ratio_k3", "full")


def vocabulary_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    layout: TokenLayout,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Generalised Jensen–Shannon divergence of two policies at every token, in nats.

        β = 0: KL(T ‖ S)        β = 1: KL(S ‖ T)
        else:  β·KL(T ‖ M) + (1 − β)·KL(S ‖ M)        M = β·T + (1 − β)·S

    Hand the result to `TokenBatch.teacher_divergence`, or with the behaviour policy as T and β = 0 to
    `TokenBatch.behavior_kl`. Logits of masked tokens may hold anything. Entries of the vocabulary whose logits are −∞ in
    both (padding rows of a head, constrained decoding) count as if they were cut off, in value and gradient.

    Args:
        student_logits: ``[*tokens, v]``, with gradient.
        teacher_logits: ``[*tokens, v]``; detached here.
        layout: Supplies the mask.
        beta: β in [0, 1].
        temperature: Both logits are divided by it. No factor of its square is added.

    Returns:
        Shaped like the mask, in float32 at least; 0 where the mask is false. Gradient in the student's
        logits.

    Raises:
        ShapeError: If the logits are not shaped like the tokens.
        CapabilityError: If an option is out of range.

    Source:
        GKD, arXiv:2306.13649, Eq. 4, as TRL writes it (β weights the teacher).

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True]]))
        >>> student = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
        >>> teacher = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
        >>> vocabulary_divergence(student, teacher, layout, beta=0.5)
        tensor([[0.0219]])
    """
    check_number("temperature", temperature, low=0.0, open_low=True)
    check_layout(layout)
    check_floating("student_logits", student_logits)
    check_floating("teacher_logits", teacher_logits)
    width = student_logits.shape[-1]
    check_shape("student_logits", student_logits, (*layout.shape, width), "one row of logits a token")
    check_shape("teacher_logits", teacher_logits, (*layout.shape, width), "one row of logits a token")
    student = _selected(student_logits, layout, 0.0) / temperature
    teacher = _selected(teacher_logits.detach(), layout, 0.0) / temperature
    found = _generalized(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    return layout.select(found)


def topk_divergence(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    layout: TokenLayout,
    *,
    beta: float = 0.0,
    tail: Literal["bucket", "renormalize"] = "bucket",
) -> Tensor:
    """The same divergence from a teacher that returns its k likeliest tokens only.

    Args:
        student_logprobs: The student's log-probabilities of the teacher's k tokens, ``[*tokens, k]``,
            normalised over the whole vocabulary, with gradient.
        teacher_logprobs: The teacher's, ``[*tokens, k]``; −∞ in unused places. Detached here.
        layout: Supplies the mask.
        beta: β in [0, 1].
        tail: ``"bucket"``: all other tokens together are one more outcome, which is a lower bound of the
            whole divergence. ``"renormalize"``: both are renormalised over the k tokens, which is blind to
            mass elsewhere.

    Returns:
        Shaped like the mask; 0 where the mask is false. NaN where a counted token has no teacher value at
        all, which `TokenBatch` turns into an error or, with `teacher_known`, leaves out.

    Raises:
        ShapeError: If the two are not of one shape.
        CapabilityError: If an option is out of range.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True]]))
        >>> student, teacher = torch.tensor([[[0.7, 0.2]]]).log(), torch.tensor([[[0.5, 0.3]]]).log()
        >>> topk_divergence(student, teacher, layout)
        tensor([[0.0920]])
    """
    check_choice("tail", tail, ("bucket", "renormalize"))
    check_layout(layout)
    check_floating("student_logprobs", student_logprobs)
    check_floating("teacher_logprobs", teacher_logprobs)
    width = student_logprobs.shape[-1]
    check_shape("student_logprobs", student_logprobs, (*layout.shape, width), "k log-probabilities a token")
    check_shape("teacher_logprobs", teacher_logprobs, (*layout.shape, width), "k log-probabilities a token")
    blank = -math.log(2.0 * width)
    student = _selected(student_logprobs, layout, blank)
    teacher = _selected(teacher_logprobs.detach(), layout, blank)
    unused = torch.isneginf(teacher)
    absent = unused.all(-1)
    if tail == "bucket":
        student = torch.cat([torch.where(unused, -torch.inf, student), _tail(student, unused)], -1)
        teacher = torch.cat([teacher, _tail(teacher, unused)], -1)
    else:
        student = torch.where(unused, -torch.inf, student)
        student = student - torch.where(absent.unsqueeze(-1), 0.0, student).logsumexp(-1, keepdim=True)
        teacher = teacher - torch.where(absent.unsqueeze(-1), 0.0, teacher).logsumexp(-1, keepdim=True)
    found = _generalized(student, teacher, beta)
    return layout.select(torch.where(absent, torch.nan, found))


def _selected(values: Tensor, layout: TokenLayout, blank: float) -> Tensor:
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return torch.where(layout.mask.unsqueeze(-1), wide, blank)


def _tail(logprobs: Tensor, unused: Tensor) -> Tensor:
    # Selected after exp's input, so that an unused place has no gradient at all.
    mass = torch.where(unused, 0.0, torch.where(unused, 0.0, logprobs).exp()).sum(-1, keepdim=True)
    smallest = torch.finfo(logprobs.dtype).eps
    return torch.log1p(-mass.clamp_max(1.0 - smallest))


def _generalized(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    check_number("beta", beta, low=0.0, high=1.0)
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    # An outcome that neither can have is in no term below, but the derivative of logaddexp(−∞, −∞) is NaN.
    impossible = torch.isneginf(teacher) & torch.isneginf(student)
    mixture = torch.logaddexp(
        torch.where(impossible, 0.0, teacher) + math.log(beta), student + math.log1p(-beta)
    )
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    # An outcome of probability 0 adds 0, and must not reach the subtraction: −∞ − −∞ is NaN.
    there = ~torch.isneginf(first)
    gap = torch.where(there, first, 0.0) - torch.where(there, second, 0.0)
    return (torch.where(there, first, 0.0).exp() * torch.where(there, gap, 0.0)).sum(-1)


def kl_estimate(
    log_ratio: Tensor, estimator: str, clamp: float = LOG_RATIO_CLAMP, output_clamp: float | None = None
) -> tuple[Tensor, Tensor]:
    """One sample's estimate of ``KL(π ‖ π_ref)`` and its derivative in ``log π``.

    With ``x = log π − log π_ref`` at a token sampled from π:

        k1 = x              slope 1          unbiased; as a loss its expected gradient is 0
        k2 = x²/2           slope x          biased value, the gradient of the reverse KL
        k3 = e⁻ˣ − 1 + x    slope 1 − e⁻ˣ    unbiased and ≥ 0; the gradient of the *forward* KL
        abs = |x|           slope sign x
        k1+, k3+            slope x          the value of k1 or k3, the gradient of k2

    Only the exponent is clamped, and its gradient is kept beyond the clamp, so the penalty pulls
    hardest where the drift is worst.

    Args:
        log_ratio: ``log π − log π_ref`` in nats, any shape.
        estimator: One of the above.
        clamp: Bound on the exponent of k3. The default gives way to an ``output_clamp`` beyond it.
        output_clamp: Bound on the absolute value. Beyond it the slope is 0 (a straight-through slope is not).

    Returns:
        Value in nats and slope, without gradient.

    Example:
        >>> kl_estimate(torch.tensor([0.0, -1.0]), "k3")[0]
        tensor([0.0000, 0.7183])
    """
    check_choice("estimator", estimator, KL_ESTIMATORS[:-1])
    x = log_ratio.detach()
    base = estimator.removesuffix("+")
    if base == "k1":
        value, slope = x, torch.ones_like(x)
    elif base == "k2":
        value, slope = x.square() / 2, x
    elif base == "abs":
        value, slope = x.abs(), x.sign()
    else:
        exponent = clamp_around(clamp, output_clamp)
        assert exponent is not None
        # expm1 keeps k3 ≥ 0 near 0, where exp(y) − 1 − y cancels to noise of either sign.
        growth = torch.expm1((-x).clamp(-exponent, exponent))
        value, slope = growth + x, -growth
    if output_clamp is not None:
        slope = select(slope, value.abs() <= output_clamp)
        value = value.clamp(-output_clamp, output_clamp)
    return value, x if estimator.endswith("+") else slope
