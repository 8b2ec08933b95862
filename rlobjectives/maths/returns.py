"""λ-returns over action tokens: the one recurrence behind GAE, TD(λ) and rewards to go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlobjectives.checks import check_choice, check_number, check_shape
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout
from rlobjectives.rollouts import Rollouts

__all__ = [
    "OBSERVATIONS",
    "Credit",
    "adaptive_trace_decay",
    "final_rewards",
    "lambda_returns",
    "plain_columns",
]

OBSERVATIONS = ("skip", "zero_value", "step")


class Credit(NamedTuple):
    """What a token's action was worth. Shaped like the mask, 0 where it is false; no gradient.

    Attributes:
        advantages: Return minus value.
        returns: λ-return: the target of a critic.
    """

    advantages: Tensor
    returns: Tensor


def plain_columns(layout: TokenLayout, **columns: Tensor | None) -> list[Tensor | None]:
    """Columns of tokens, and ``final_rewards`` of sequences, checked against the layout and without gradient.

    Raises:
        ShapeError: If one does not fit: nothing is cut or broadcast.
    """
    for name, column in columns.items():
        if column is not None and name == "final_rewards":
            check_shape(name, column, (layout.num_sequences,), "one reward per sequence")
        elif column is not None:
            layout.check(name, column)
    return [None if column is None else column.detach() for column in columns.values()]


def lambda_returns(
    layout: TokenLayout,
    *,
    values: Tensor | None = None,
    token_rewards: Tensor | None = None,
    final_rewards: Tensor | None = None,
    discount: float = 1.0,
    trace_decay: float | Tensor = 1.0,
    observations: str = "skip",
) -> Credit:
    """λ-returns and advantages over the counted (action) tokens ``t₁ < … < tₙ`` of each sequence.

        Gₖ = rₖ + γ·[(1 − λ)·Vₖ₊₁ + λ·Gₖ₊₁]        Aₖ = Gₖ − Vₖ        Gₙ = rₙ + R

    ``A`` is the generalised advantage ``δₖ + γλ·Aₖ₊₁`` with ``δₖ = rₖ + γVₖ₊₁ − Vₖ``. Solving for
    ``Uₖ = γ[(1 − λ)Vₖ + λGₖ]`` needs one scan, no value of a neighbour and no division by λ. The final
    reward R enters behind the last action token, wherever observations or padding put the end of the
    sequence. What a masked token holds never matters, except under ``observations="step"``.

    Args:
        layout: Where the tokens lie; the mask says which are actions.
        values: V, shaped like the mask; None is 0 everywhere.
        token_rewards: r, shaped like the mask; None is 0 everywhere. Read at action tokens only.
        final_rewards: R, ``[n]``: reward of the whole sequence, plus γ times the value of what follows where
            it was truncated.
        discount: γ in [0, 1].
        trace_decay: λ in [0, 1], one number, or one per sequence ``[n]``; that the numbers of a tensor are in range is
            the caller's to know, since looking at them would stop the device.
        observations: ``"skip"``: a masked token is no step. ``"zero_value"``: masked tokens before the last
            action are steps with value 0. ``"step"``: they are steps with their own value, which must
            then be finite.

    Returns:
        In the precision of ``values`` (else of ``token_rewards``, else float64). Scope: one sequence. Gradient: none,
        whatever the arguments carry.

    Raises:
        CapabilityError: If an option is out of range.
        ShapeError: If a column has another shape, or the layout is none.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, False, True]]))
        >>> credit = lambda_returns(
        ...     layout, values=torch.tensor([[0.1, 7.0, 0.3]]), final_rewards=torch.tensor([1.0])
        ... )
        >>> credit.advantages
        tensor([[0.9000, 0.0000, 0.7000]])
    """
    check_layout(layout)
    check_number("discount", discount, low=0.0, high=1.0)
    check_choice("observations", observations, OBSERVATIONS)
    if isinstance(trace_decay, Tensor):
        check_shape(
            "trace_decay", trace_decay, (layout.num_sequences,), "one per sequence, or one number for all"
        )
        trace_decay = trace_decay.detach()
    else:
        check_number("trace_decay", trace_decay, low=0.0, high=1.0)
    values, token_rewards, final_rewards = plain_columns(
        layout, values=values, token_rewards=token_rewards, final_rewards=final_rewards
    )
    steps = layout.mask
    if observations != "skip":
        steps = layout.reverse_scan(torch.ones(layout.shape, device=layout.device), 1.0) > 0
    like = values if values is not None else token_rewards
    dtype = torch.float64 if like is None else torch.promote_types(like.dtype, torch.float32)
    returns = torch.empty(layout.shape, dtype=dtype, device=layout.device)
    advantages = returns if values is None else torch.empty_like(returns)
    for piece in layout.pieces():
        beside = ~piece.take(layout.mask)
        skipped = beside if steps is layout.mask else ~piece.take(steps)
        decay = piece.expand(trace_decay).double() if isinstance(trace_decay, Tensor) else trace_decay
        carried = piece.buffers.get("carried", piece.size).zero_()
        reward = value = None
        if values is not None:
            value = piece.load("value", values, skipped if observations == "step" else beside)
            torch.mul(value, discount * (1.0 - decay), out=carried)
        if token_rewards is not None:
            reward = piece.load("reward", token_rewards, beside)
            if isinstance(decay, Tensor):
                carried.addcmul_(reward, discount * decay)
            else:
                carried.add_(reward, alpha=discount * decay)
        carried = piece.scan_(carried, discount * decay, skipped, final_rewards)
        total = piece.following("total", carried, final_rewards)
        if reward is not None:
            total += reward
        piece.put(returns, total.masked_fill_(beside, 0.0))
        if value is not None:
            total -= value if observations != "step" else value.masked_fill_(beside, 0.0)
            piece.put(advantages, total)
    return Credit(advantages, returns)


def adaptive_trace_decay(counts: Tensor, alpha: float) -> Tensor:
    """VAPO's length-adaptive λ: ``1 − 1 / (α·length)``, held to [0, 1].

    Args:
        counts: Action tokens of each sequence, ``[n]``.
        alpha: α > 0; the larger, the farther credit reaches.

    Returns:
        Float64 ``[n]``.

    Raises:
        CapabilityError: Unless α > 0.

    Example:
        >>> adaptive_trace_decay(torch.tensor([10, 100]), 0.05)
        tensor([0.0000, 0.8000], dtype=torch.float64)
    """
    check_number("alpha", alpha, low=0.0, open_low=True)
    return (1.0 - 1.0 / (alpha * counts.double().clamp_min(1.0))).clamp(0.0, 1.0)


def final_rewards(rewards: Tensor, rollouts: Rollouts, discount: float, reader: str) -> Tensor:
    """Rewards ``[n]`` plus γ times the bootstrap value of each truncated sequence.

    Raises:
        MissingColumnError: If some sequences are marked truncated without `bootstrap_values`.
    """
    if rollouts.truncated is None or (rollouts.bootstrap_values is None and not rollouts.unbootstrapped):
        return rewards  # nothing was cut off, as Rollouts found at the boundary
    values = rollouts.need("bootstrap_values", f"{reader} (truncated sequences)").double()
    return rewards + discount * torch.where(rollouts.truncated, values, 0.0)
