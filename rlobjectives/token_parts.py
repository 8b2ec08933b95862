"""Whatever reads tokens: a loss per token and its slope, and the parts that give one."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.checks import refuse_rows
from rlobjectives.component import Component, WindowContext
from rlobjectives.errors import MissingColumnError, RLObjectivesError
from rlobjectives.statistics import Stat
from rlobjectives.tokens import COLUMNS, TokenBatch

__all__ = ["Round", "TokenLoss", "TokenMetric", "TokenPart", "TokenTerm", "reading"]


class TokenLoss(NamedTuple):
    """What a loss says about every token of a micro-batch; nothing here carries gradient.

    Attributes:
        value: The loss of each token, shaped like the mask. Masked places are ignored.
        slope: Derivative of the *sequence's summed* loss with respect to this token's log-probability;
            for a loss that treats tokens one by one, simply the derivative of `value`.
        metrics: Statistics to report, by the names the part declares.
        slopes: Derivative of `value` with respect to other differentiable columns of the batch
            (``"ref_kl"``, ``"behavior_kl"``, ``"teacher_divergence"``), by column, shaped like the mask.
    """

    value: Tensor
    slope: Tensor
    metrics: Mapping[str, Stat] = {}
    slopes: Mapping[str, Tensor] = {}


@contextmanager
def reading(part: Component, tokens: TokenBatch) -> Iterator[None]:
    """Run a part on some tokens; a column that it takes for a tensor and that is None is named.

    Args:
        part: Who reads.
        tokens: The columns.

    Raises:
        MissingColumnError: In place of the error that Python or torch has for an operation on None.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error):
            raise
        name, absent = type(part).__name__, [one for one in COLUMNS if getattr(tokens, one) is None]
        moved = ""
        if "old_logprobs" in absent:
            moved = (
                " old_logprobs is None while the policy has not moved: read tokens.old(), which is then the detached "
                "logprobs."
            )
        raise MissingColumnError(
            f"{name} failed on a column that is None ({error}); this TokenBatch carries no {', '.join(absent)}.{moved} "
            f"Read a column that must be there with tokens.need(name, {name!r})."
        ) from error


@dataclass(frozen=True, slots=True)
class Round:
    """What a part measures on every micro-batch for one exchange before the first loss.

    Attributes:
        kinds: The statistics it gives, by name. Merged, they are in the context of the rounds after it and of the loss.
        measure: From one micro-batch, without gradient, and the context of the rounds before: those statistics. The
            window's own counts are NaN in the first exchange.
    """

    kinds: Mapping[str, type[Stat]]
    measure: Callable[[TokenBatch, WindowContext], Mapping[str, Stat]]


class TokenPart(Component):
    """Anything that reads tokens: losses, penalties, corrections.

    A part that must know something of the whole window before the first loss declares it in ``window_statistics`` and
    measures it in `statistics`, which is called on every micro-batch, merged, and handed back in the context. One that
    needs several such rounds, each after the last, gives them in `rounds`. Either makes it need a pre-pass.

    The window may hand a large micro-batch over in blocks of whole sequences. A part that looks at its
    micro-batch as a whole says so with ``depends_on_cut`` in its capabilities, and gets it whole.

    Attributes:
        prepass_rounds: How often `statistics` is exchanged, where `rounds` is not overridden.
        prepass_reads_advantages: Whether a round or `keep` looks at advantages, which are final
            only after the window's first collective.
    """

    prepass_rounds: ClassVar[int] = 1
    prepass_reads_advantages: ClassVar[bool] = False

    def required(self) -> Capabilities:
        """What its columns and options need; a pre-pass where it has rounds or drops tokens from the denominators."""
        waits = self.shrinks_denominator or bool(self.rounds())
        return super().required().merge(Capabilities(needs_prepass=waits))

    def rounds(self) -> tuple[Round, ...]:
        """What it must know of the window before the first loss, one exchange after the other."""
        if not self.declared_statistics():
            return ()
        return tuple(
            Round(self.round_statistics(turn), self.statistics) for turn in range(self.prepass_rounds)
        )

    def round_statistics(self, turn: int) -> Mapping[str, type[Stat]]:
        """What `statistics` returns in one round; the same in every round, unless a part knows better."""
        del turn
        return self.declared_statistics()

    def statistics(self, tokens: TokenBatch, context: WindowContext) -> Mapping[str, Stat]:
        """What the part must know about the window, from one micro-batch.

        Args:
            tokens: One micro-batch, without gradient.
            context: Statistics of the rounds before this one; ``context.round`` counts from 0.
        """
        del tokens, context
        return {}

    @property
    def shrinks_denominator(self) -> bool:
        """Whether tokens this part drops also leave the policy loss's denominators."""
        return False

    def keep(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        """Which tokens this part leaves in the policy loss, bool, shaped like the mask; all by default."""
        del context
        return torch.ones_like(tokens.layout.mask)


class TokenMetric(TokenPart):
    """Reports something of the tokens of a window and changes nothing: an entry of an objective's ``metrics``.

    What `measure` gives for each micro-batch is merged over all micro-batches and ranks by its statistic, and reported
    with the window's other metrics, under the names that ``metrics`` declares.

    Example:
        >>> from rlobjectives import GRPO, Mean, Metric, Objective, PaddedLayout, TokenBatch
        >>> class Surprise(TokenMetric):
        ...     metrics = {"policy/surprise": Metric(Mean, "fraction", "tokens below a probability of 1 %")}
        ...     def measure(self, tokens, context):
        ...         return {"policy/surprise": Mean.of((tokens.logprobs < -4.6).double(), tokens.layout.mask)}
        >>> layout = PaddedLayout(torch.tensor([[True, True], [True, False]]))
        >>> objective = Objective(estimator=GRPO(), metrics=(Surprise(),))
        >>> estimate = torch.tensor([1.0, -1.0])
        >>> window = objective.freeze([(estimate, layout)])
        >>> tokens = TokenBatch(logprobs=torch.tensor([[-1.0, -9.0], [-0.5, -9.0]]), layout=layout)
        >>> output = window.loss(tokens.replace(advantages=window.advantages(estimate, layout)))
        >>> round(window.summarize([output])["policy/surprise"], 4)
        0.3333
    """

    @abc.abstractmethod
    def measure(self, tokens: TokenBatch, context: WindowContext) -> Mapping[str, Stat]:
        """Statistics of one micro-batch.

        Args:
            tokens: One micro-batch, or some of its sequences, without gradient. Advantages are final.
            context: What the window knows.

        Returns:
            By the names that ``metrics`` declares; only tokens under the mask may count.
        """


class TokenTerm(TokenPart):
    """Anything that adds a loss to every token: the policy loss, a KL penalty, a distillation term.

    A subclass gives either `value_and_slope` in closed form, or just `value`, and autograd finds the
    slope.

    Attributes:
        sequence_level: Whether one number is shared by all tokens of a sequence, so that weights must
            not differ inside a sequence.
    """

    sequence_level: ClassVar[bool] = False

    @property
    def straight_through(self) -> bool:
        """Whether the slope differs from the derivative of the value on purpose, as behind a stop-gradient."""
        return False

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """A loss shared by a sequence's tokens cannot take weights that differ between them."""
        del facts
        reduction = parts.get("reduction")
        if self.sequence_level and getattr(reduction, "token_level", False):
            yield (
                f"{type(self).__name__} has one loss for all tokens of a sequence, but "
                f"{type(reduction).__name__} weighs them differently, so its slope would be wrong. Choose a "
                "reduction with one weight per sequence (SequenceMean), or a loss of single tokens."
            )

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        """The loss of each token, differentiable in ``tokens.logprobs``.

        Write ratios with `TokenBatch.old`, as ``(tokens.logprobs - tokens.old()).exp()``: what `functional` returns
        carries no gradient, and `TokenBatch.old_logprobs` is None until the policy has moved.

        Args:
            tokens: One micro-batch.
            context: What the window knows.

        Returns:
            Shaped like the mask. It may hold anything under a false mask.
        """
        del tokens, context
        raise RLObjectivesError(
            f"{type(self).__name__} gives neither value() nor value_and_slope(). Override one of them."
        )

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """The loss of each token and its slope; by autograd through `value` unless overridden.

        Raises:
            CapabilityError: If `value` does not depend on ``tokens.logprobs`` where there is something to learn.
        """
        evaluating = torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
        with torch.enable_grad():
            leaf = tokens.layout.select(tokens.logprobs.detach()).requires_grad_()
            value = self.value(tokens.replace(logprobs=leaf), context)
            tokens.layout.check(f"{type(self).__name__}.value", value)
            total = tokens.layout.select(value).sum()
            slope = None
            if total.requires_grad:
                (slope,) = torch.autograd.grad(total, leaf, allow_unused=True)
        if slope is None:
            if not evaluating:
                self._refuse_constant(tokens, value)
            slope = torch.zeros_like(leaf)
        return TokenLoss(value.detach(), slope)

    def _refuse_constant(self, tokens: TokenBatch, value: Tensor) -> None:
        # Without a graph there is nothing to train. That is right where nothing counts, where the term adds nothing,
        # and for a policy loss where no advantage says what to learn.
        refuse_rows(
            (tokens.layout.select(self._taught_by(tokens, value)) != 0).flatten(),
            f"have something to learn, but {type(self).__name__}.value() does not depend on tokens.logprobs: it would "
            "train nothing",
            "Do not detach them, and write ratios as (tokens.logprobs - tokens.old()).exp(): the functions of "
            "rlobjectives.functional return numbers without gradient. If the slope is known, override "
            "value_and_slope() instead.",
            unit="token",
        )

    def _taught_by(self, tokens: TokenBatch, value: Tensor) -> Tensor:
        """What is 0 wherever there is nothing to learn."""
        del tokens
        return value.detach()
