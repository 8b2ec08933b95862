"""V-trace: value targets and advantages of the current policy from samples of an older one."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_number
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout
from rlobjectives.layouts.scan import Piece
from rlobjectives.maths.ratios import clamp_around
from rlobjectives.maths.returns import Credit, plain_columns

__all__ = ["vtrace_returns"]


def vtrace_returns(
    layout: TokenLayout,
    values: Tensor,
    log_ratio: Tensor,
    *,
    token_rewards: Tensor | None = None,
    final_rewards: Tensor | None = None,
    discount: float = 1.0,
    trace_decay: float = 1.0,
    rho_clip: float = 1.0,
    trace_clip: float = 1.0,
    policy_rho_clip: float = 1.0,
    log_ratio_clamp: float = 20.0,
) -> Credit:
    """Off-policy corrected value targets ``v`` and advantages over the counted tokens.

        δₖ = ρ̂ₖ·(rₖ + γVₖ₊₁ − Vₖ)      eₖ = δₖ + γλ·ĉₖ·eₖ₊₁      vₖ = Vₖ + eₖ
        Aₖ = ρ̃ₖ·(rₖ + γvₖ₊₁ − Vₖ)

    with ``ρ̂``, ``ĉ``, ``ρ̃`` the ratio cut at its three bounds. A masked token is no step.

    Args:
        layout: Where the tokens lie.
        values: V, shaped like the mask.
        log_ratio: Log-probability now minus when sampled, in nats, shaped like the mask.
        token_rewards: r, shaped like the mask; None is 0 everywhere.
        final_rewards: Reward of the whole sequence (plus γ times a bootstrap value), ``[n]``.
        discount: γ in [0, 1].
        trace_decay: λ in [0, 1].
        rho_clip: Upper bound of ρ̂.
        trace_clip: Upper bound of ĉ.
        policy_rho_clip: Upper bound of ρ̃.
        log_ratio_clamp: Bound on the absolute log-ratio before ``exp``. The default gives way to a bound on the ratio
            that lies farther out.

    Returns:
        Advantages, and v as returns, in the precision of ``values``. Scope: one sequence. Gradient: none, whatever the
        arguments carry.

    Raises:
        CapabilityError: If an option is out of range.
        ShapeError: If a column has another shape, or the layout is none.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True]]))
        >>> ones = torch.ones(1, 2)
        >>> vtrace_returns(layout, 0.5 * ones, 0.0 * ones, final_rewards=torch.tensor([1.0])).advantages
        tensor([[0.5000, 0.5000]])
    """
    check_layout(layout)
    check_number("discount", discount, low=0.0, high=1.0)
    check_number("trace_decay", trace_decay, low=0.0, high=1.0)
    bounds = {"rho_clip": rho_clip, "trace_clip": trace_clip, "policy_rho_clip": policy_rho_clip}
    for name, bound in {**bounds, "log_ratio_clamp": log_ratio_clamp}.items():
        check_number(name, bound, low=0.0, open_low=True)
    clamp = clamp_around(log_ratio_clamp, rho_clip, trace_clip, policy_rho_clip)
    assert clamp is not None
    token_rewards, final_rewards = plain_columns(
        layout, token_rewards=token_rewards, final_rewards=final_rewards
    )
    for name, column in (("values", values), ("log_ratio", log_ratio)):
        layout.check(name, column)
    values, log_ratio = values.detach(), log_ratio.detach()
    dtype = torch.promote_types(values.dtype, torch.float32)
    advantages = torch.empty(layout.shape, dtype=dtype, device=layout.device)
    returns = torch.empty_like(advantages)
    for piece in layout.pieces():
        beside = ~piece.take(layout.mask)
        value, log = piece.load("value", values, beside), piece.load("log", log_ratio, beside)
        ratio = log.clamp(-clamp, clamp).exp()
        gain = -value
        if token_rewards is not None:
            gain += piece.load("reward", token_rewards, beside)
        ahead = _discounted_next(piece, beside, value, discount, final_rewards)
        surprise = (ratio.clamp_max(rho_clip) * (gain + ahead)).masked_fill_(beside, 0.0)
        trace = discount * trace_decay * ratio.clamp_max(trace_clip)
        target = (value + piece.scan_(surprise, trace, beside, None)).masked_fill_(beside, 0.0)
        piece.put(returns, target)
        ahead = _discounted_next(piece, beside, target, discount, final_rewards)
        gain.add_(ahead).mul_(ratio.clamp_max(policy_rho_clip))
        piece.put(advantages, gain.masked_fill_(beside, 0.0))
    return Credit(advantages, returns)


def _discounted_next(
    piece: Piece, beside: Tensor, state: Tensor, discount: float, final: Tensor | None
) -> Tensor:
    # A scan with decay 0 carries γ·state back to the action before it, over any observations between;
    # behind the last action stands the final reward, which takes the place of γ·V there.
    carried = piece.scan_(discount * state, 0.0, beside, final)
    return piece.following("ahead", carried, final)
