"""Importance ratios: select first, clamp second, exponentiate last."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlobjectives.checks import check_number
from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.tokens import TokenBatch

__all__ = [
    "LOG_RATIO_CLAMP",
    "RATIO_BASES",
    "Ratio",
    "SequenceRatio",
    "base_logprobs",
    "check_clamp",
    "clamp_around",
    "importance_ratio",
    "log_bound",
    "sequence_ratio",
    "sequence_sums",
    "token_ratio",
]

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are held to ±20 before ``exp``: e²⁰ ≈ 5e8 is finite in every dtype that is used."""

_FARTHEST = 700.0

RATIO_BASES = ("old", "behavior")
"""What a ratio may be taken against: the policy that starts the updates, or the one that sampled."""


def check_clamp(clamp: float | None) -> None:
    """Raise unless a log-ratio clamp is None or a positive number."""
    if clamp is not None:
        check_number("log_ratio_clamp", clamp, low=0.0, open_low=True)


def clamp_around(clamp: float | None, *bounds: float | None) -> float | None:
    """The clamp on a log-ratio under which none of these bounds on the ratio is out of reach.

    A ratio that was held at e^±20 cannot be told from one beyond a bound that lies farther out, so the default clamp
    gives way to such a bound. One that was chosen stands: it is the tighter bound then.

    Args:
        clamp: Bound on the absolute log-ratio; None for none.
        bounds: Numbers that the ratio is compared with or held at, ≥ 0; None for no bound.

    Example:
        >>> clamp_around(20.0, 0.8, 1.2, None), round(clamp_around(20.0, 1e10), 3), clamp_around(5.0, 1e10)
        (20.0, 24.026, 5.0)
    """
    if clamp != LOG_RATIO_CLAMP:
        return clamp
    # One nat farther, so that what is beyond a bound is seen to be; exp stays finite in float64.
    far = [abs(math.log(bound)) + 1.0 for bound in bounds if bound is not None and bound > 0.0]
    return max([clamp, *(min(one, _FARTHEST) for one in far if one > clamp + 1.0)])


def log_bound(bound: float | None) -> float:
    """The logarithm of a bound on a ratio, to be compared with a log-ratio: −∞ for 0, and ∞ for None, which is no bound.

    Example:
        >>> log_bound(1.0), log_bound(0.0), log_bound(None)
        (0.0, -inf, inf)
    """
    return math.inf if bound is None else math.log(bound) if bound > 0.0 else -math.inf


def base_logprobs(tokens: TokenBatch, base: str, reader: str) -> Tensor:
    """The denominator of a ratio: `TokenBatch.old`, or the sampler's own log-probabilities.

    Args:
        tokens: One micro-batch.
        base: ``"old"`` or ``"behavior"``.
        reader: Who asks, for the message.

    Raises:
        MissingColumnError: If the sampler's log-probabilities are asked for and not there.
    """
    return tokens.need("behavior_logprobs", reader) if base == "behavior" else tokens.old()


class Ratio(NamedTuple):
    """An importance ratio and what a slope needs to know of it.

    Attributes:
        log: Log-ratio before the clamp, 0 at masked places.
        value: ``exp`` of the clamped log-ratio.
        inside: Where the clamp did nothing. Outside, the ratio is constant and its slope is 0.
    """

    log: Tensor
    value: Tensor
    inside: Tensor


def importance_ratio(
    logprobs: Tensor, other: Tensor, layout: TokenLayout, clamp: float | None = LOG_RATIO_CLAMP
) -> Ratio:
    """``exp(logprobs − other)`` at counted tokens, and 1 elsewhere.

    Args:
        logprobs: Numerator, in nats, shaped like the mask.
        other: Denominator, in nats, shaped like the mask.
        layout: Supplies the mask; NaN and infinity under a false mask never get in.
        clamp: Bound on the absolute log-ratio before ``exp``; None leaves it free (float32 overflows at
            88.7).

    Returns:
        Without gradient. A NaN at a counted token stays NaN.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True, False]]))
        >>> importance_ratio(torch.tensor([[0.0, 99.0, 1.0]]), torch.zeros(1, 3), layout).value
        tensor([[1.0000e+00, 4.8517e+08, 1.0000e+00]])
    """
    layout.check("logprobs", logprobs)
    layout.check("other", other)
    log = layout.select(logprobs.detach() - other.detach())
    if clamp is None:
        return Ratio(log, log.exp(), torch.ones_like(layout.mask))
    return Ratio(log, log.clamp(-clamp, clamp).exp(), log.abs() <= clamp)


def token_ratio(tokens: TokenBatch, clamp: float | None = LOG_RATIO_CLAMP) -> Ratio:
    """Ratio of the current policy to the one that started this round of updates, token by token."""
    return importance_ratio(tokens.logprobs, tokens.old(), tokens.layout, clamp)


class SequenceRatio(NamedTuple):
    """A length-normalised importance ratio of whole sequences.

    Attributes:
        log: Mean log-ratio of a sequence's counted tokens, before the clamp, float64 ``[n]``; 0 without any.
        value: ``exp`` of the clamped mean, float64 ``[n]``.
        inside: Where the clamp did nothing, bool ``[n]``.
        counts: Counted tokens of the whole sequence, float64 ``[n]``.
    """

    log: Tensor
    value: Tensor
    inside: Tensor
    counts: Tensor


def sequence_sums(layout: TokenLayout, context: WindowContext, *columns: Tensor) -> tuple[Tensor, ...]:
    """Counted tokens of each whole sequence, then the sum of each column over them.

    Everything travels in one sum over the context-parallel ranks, so a shard knows its whole sequence.

    Args:
        layout: Supplies mask and sequences.
        context: Supplies the sum over context-parallel ranks.
        columns: Token columns, shaped like the mask; what they hold under a false mask stays out.

    Returns:
        One float64 ``[n]`` more than there are columns.

    Example:
        >>> from rlobjectives import GRPO, Objective, PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True, False]]))
        >>> context = Objective(estimator=GRPO()).freeze([(torch.zeros(1), layout)]).context("policy_loss")
        >>> sequence_sums(layout, context, torch.tensor([[1.0, 2.0, torch.nan]]))
        (tensor([2.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    local = [layout.local_counts(), *(layout.segment_sum(column.double()) for column in columns)]
    return context.context_sum(torch.stack(local)).unbind(0)


def sequence_ratio(counts: Tensor, total: Tensor, clamp: float | None = LOG_RATIO_CLAMP) -> SequenceRatio:
    """``exp(Σₜ log-ratioₜ / T)``: the geometric mean of a sequence's token ratios.

    The mean is taken in log space, so no token's ratio can overflow on the way.

    Args:
        counts: Counted tokens T of each whole sequence, ``[n]``.
        total: Summed log-ratio of each whole sequence, ``[n]`` (both from `sequence_sums`).
        clamp: Bound on the absolute mean before ``exp``; None for none.

    Returns:
        Float64, without gradient; ratio 1 for a sequence without counted tokens.
    """
    log = total / counts.clamp_min(1.0)
    if clamp is None:
        return SequenceRatio(log, log.exp(), torch.ones_like(log, dtype=torch.bool), counts)
    return SequenceRatio(log, log.clamp(-clamp, clamp).exp(), log.abs() <= clamp, counts)
