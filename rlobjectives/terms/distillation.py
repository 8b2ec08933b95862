"""What a teacher adds: a term in the advantages, or a divergence in the loss."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlobjectives.columns import Read, read
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.masking import select
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Stat
from rlobjectives.token_parts import TokenLoss, TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["AdvantageShaping", "Distillation", "DivergenceDistillation", "ReverseKLDistillation"]


class AdvantageShaping(Component):
    """A part that changes advantages token by token, after the estimator has finished.

    Example:
        >>> from rlobjectives import GRPO, Objective
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Halved(AdvantageShaping):
        ...     def shape(self, tokens):
        ...         return tokens.replace(advantages=0.5 * tokens.need("advantages", "Halved")), {}
        >>> Objective(estimator=GRPO(), distillation=Halved()).shapings()
        (Halved(),)
    """

    @abc.abstractmethod
    def shape(self, tokens: TokenBatch) -> tuple[TokenBatch, dict[str, Stat]]:
        """The micro-batch with other advantages, and metrics.

        Args:
            tokens: One micro-batch, without gradient.
        """


class Distillation(Component):
    """What a teacher adds to an objective: `ReverseKLDistillation` or `DivergenceDistillation`."""


@dataclass(frozen=True, kw_only=True)
class ReverseKLDistillation(Distillation, AdvantageShaping):
    """On-policy distillation: each token's log-ratio to the teacher is taken off its advantage.

        Aₜ ← Aₜ − coef · (ℓₜ − ℓₜᵀ)        or, with ``replace``,        Aₜ ← −coef · (ℓₜ − ℓₜᵀ)

    With samples of the student, the policy gradient of this advantage is the gradient of ``coef · KL(π ‖
    π_T)``; no other estimate of the divergence has that property. The log-ratio is a constant: no gradient
    goes through it.

    Args:
        coef: Weight of the teacher, > 0, in advantage per nat.
        replace: Learn from the teacher alone.
        missing: What to do where `TokenBatch.teacher_known` is False: ``"error"``, or ``"skip"``: nothing is
            added there (with ``replace``, the advantage is 0).

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        arXiv:2306.13649; "On-policy distillation", Thinking Machines, 2025. ROLL sums over several teachers;
        prime-rl drops tokens whose probability fell by more than 0.2.

    Example:
        >>> ReverseKLDistillation(coef=0.5).declared_reads()[0].column.name
        'teacher_logprobs'
    """

    metrics: ClassVar[Mapping[str, Metric]] = {
        "distillation/reverse_kl": Metric(Mean, "nats/token", "log-ratio of the policy to the teacher"),
    }

    coef: float = option(1.0, low=0, open_low=True)
    replace: bool = False
    missing: Literal["error", "skip"] = "error"

    def declared_reads(self) -> tuple[Read, ...]:
        """The teacher's log-probabilities, of which some may be missing if those are skipped."""
        return (read("teacher_logprobs", unknown=self.missing == "skip"),)

    def shape(self, tokens: TokenBatch) -> tuple[TokenBatch, dict[str, Stat]]:
        """Advantages with the teacher's term, in the estimator's precision."""
        layout = tokens.layout
        teacher = tokens.need("teacher_logprobs", "ReverseKLDistillation")
        flags = tokens.known("teacher_logprobs") if self.missing == "skip" else None
        known = layout.mask if flags is None else layout.mask & flags
        gap = select(tokens.logprobs.detach().double() - teacher.double(), known)
        advantages = layout.select(tokens.need("advantages", "ReverseKLDistillation")).double()
        shaped = -self.coef * gap if self.replace else advantages - self.coef * gap
        return tokens.replace(advantages=shaped), {"distillation/reverse_kl": Mean.of(gap, known)}


@dataclass(frozen=True, kw_only=True)
class DivergenceDistillation(Distillation, TokenTerm):
    """Adds ``coef · D(teacher, policy)`` to every token's loss.

    D is `TokenBatch.teacher_divergence`, which the trainer computes from logits with `vocabulary_divergence`
    or, for a teacher that returns its likeliest tokens only, with `topk_divergence`; β and the temperature
    are theirs. The gradient goes through that column. The term is weighted by the objective's reduction.

    Args:
        coef: Weight of the divergence, ≥ 0.
        missing: What to do where `TokenBatch.teacher_known` is False: ``"error"``, or ``"skip"``: it adds 0
            there.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        GKD, arXiv:2306.13649. TRL's trainer averages over the micro-batch's tokens instead of the window's.

    Example:
        >>> DivergenceDistillation(coef=0.1).coef
        0.1
    """

    metrics: ClassVar[Mapping[str, Metric]] = {
        "distillation/divergence": Metric(Mean, "nats/token", "divergence of the policy from the teacher"),
    }

    coef: float = option(1.0, low=0)
    missing: Literal["error", "skip"] = "error"

    def declared_reads(self) -> tuple[Read, ...]:
        """The divergence, of which some may be missing if those are skipped."""
        return (read("teacher_divergence", unknown=self.missing == "skip"),)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Weighted divergence; its slope is in the divergence column alone."""
        del context
        layout = tokens.layout
        column = tokens.need("teacher_divergence", "DivergenceDistillation").detach()
        flags = tokens.known("teacher_divergence") if self.missing == "skip" else None
        known = layout.mask if flags is None else layout.mask & flags
        divergence = select(column, known)
        slope = torch.where(known, torch.full_like(column, self.coef), 0.0)
        metrics: dict[str, Stat] = {"distillation/divergence": Mean.of(divergence, known)}
        return TokenLoss(
            self.coef * divergence, torch.zeros_like(column), metrics, {"teacher_divergence": slope}
        )
