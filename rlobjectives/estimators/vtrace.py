"""V-trace: values and advantages of the current policy from samples of an older one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.checks import check_number
from rlobjectives.estimators.gae import final_rewards
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.returns import Credit, plain_columns
from rlobjectives.estimators.shaping import sequence_rewards
from rlobjectives.estimators.token_rewards import token_rewards
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout
from rlobjectives.layouts.scan import Piece
from rlobjectives.losses.ratios import clamp_around
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["VTrace", "vtrace_returns"]


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


@dataclass(frozen=True, kw_only=True)
class VTrace(RewardWeights, Normalized):
    """Actor-critic with V-trace correction from the sampler's policy to the current one.

    See `vtrace_returns` for the formula. The ratio is that of the policy at the start of the updates to the
    one that sampled; with equal policies and unit bounds this is GAE's target and a one-step advantage.
    Do not add another importance correction on top.

    Args:
        discount: γ in [0, 1].
        trace_decay: λ in [0, 1].
        rho_clip: Upper bound of the ratio in δ; moves the fixed point towards the sampler's policy.
        trace_clip: Upper bound of the ratio in the trace; trades variance only.
        policy_rho_clip: Upper bound of the ratio in the advantage.
        weights: One weight a reward, in column order or by name; None weighs all 1.
        on_lost_reward: ``"error"`` or ``"drop"`` for a reward other than 0 without an action token.
        on_observation_reward: ``"error"``, ``"credit"`` or ``"drop"`` for a token reward other than 0 at a place that is
            no action (see `token_rewards`); ``"credit"`` adds it to the last action token before it.
        normalize: ``"none"``, or ``"window"`` to whiten over the window's tokens.
        ddof: 1 sample, 0 population variance of that whitening.
        epsilon: Its stability constant.
        epsilon_mode: ``"add"``, ``"variance"`` or ``"floor"``.

    Raises:
        CapabilityError: If an option is out of range, or a reward is lost.
        MissingColumnError: Without values, old or behaviour log-probabilities.

    Source:
        IMPALA, arXiv:1802.01561, Eq. 1 and remark 2 (λ); the advantage's bootstrap is the whole target, as in
        its section 4.2 (rlax mixes λ into it too). rlax skips non-learnable steps without discounting, as here;
        torchrl does not mask.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> ones = torch.ones(1, 2)
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]),
        ...     layout=PaddedLayout(torch.tensor([[True, True]])), values=0.5 * ones,
        ...     old_logprobs=-ones, behavior_logprobs=-ones,
        ... )
        >>> VTrace().value_targets(rollouts)
        tensor([[1., 1.]])
    """

    refuses: ClassVar[frozenset[str]] = frozenset({"unscored_sequences"})
    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_critic=True,
        needs_behavior_logprobs=True,
        requires_sampled_distribution=True,
        supports_context_parallel=False,
    )
    token_level: ClassVar[bool] = True

    discount: float = option(1.0, low=0, high=1)
    trace_decay: float = option(1.0, low=0, high=1)
    rho_clip: float = option(1.0, low=0, open_low=True)
    trace_clip: float = option(1.0, low=0, open_low=True)
    policy_rho_clip: float = option(1.0, low=0, open_low=True)
    on_lost_reward: Literal["error", "drop"] = "error"
    on_observation_reward: Literal["error", "credit", "drop"] = "error"

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Corrected advantages, shaped like the mask, in the precision of the values."""
        return self.credit(rollouts).advantages

    def value_targets(self, rollouts: Rollouts) -> Tensor:
        """Corrected values v at action tokens, 0 elsewhere."""
        return self.credit(rollouts).returns

    def credit(self, rollouts: Rollouts) -> Credit:
        """Advantages and value targets in one go."""
        old, behavior = (rollouts.need(name, "VTrace") for name in ("old_logprobs", "behavior_logprobs"))
        rewards = sequence_rewards(rollouts, self.combined(rollouts), "VTrace", self.on_lost_reward)
        return vtrace_returns(
            rollouts.tokens("VTrace"),
            rollouts.need("values", "VTrace"),
            old - behavior,
            token_rewards=token_rewards(rollouts, "VTrace", self.on_observation_reward, self.on_lost_reward),
            final_rewards=final_rewards(rewards, rollouts, self.discount, "VTrace"),
            discount=self.discount,
            trace_decay=self.trace_decay,
            rho_clip=self.rho_clip,
            trace_clip=self.trace_clip,
            policy_rho_clip=self.policy_rho_clip,
        )
