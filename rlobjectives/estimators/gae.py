"""GAE: what an action was worth beyond what a critic expected, for one turn or many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.returns import Credit, adaptive_trace_decay, final_rewards, lambda_returns
from rlobjectives.maths.sessions import Trajectories, concatenate, session_rewards
from rlobjectives.maths.shaping import (
    refuse_lost_rewards,
    refuse_unscored,
    sequence_rewards,
    shaped_token_rewards,
)
from rlobjectives.maths.token_rewards import AT_THE_END, AT_TOKENS, token_rewards
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["GAE"]


@dataclass(frozen=True, kw_only=True)
class GAE(RewardWeights, Normalized):
    """Generalised advantage estimation over action tokens.

        δₖ = rₖ + γVₖ₊₁ − Vₖ        Aₖ = δₖ + γλ·Aₖ₊₁        Vₙ₊₁ = 0, or the bootstrap value

    The tokens ``t₁ < … < tₙ`` are those the mask counts: an observation between two of them costs no
    discount and lends no value. The sequence's reward falls on its last *action* token; trajectories never
    bootstrap each other. A sequence is bootstrapped only if `Rollouts.truncated` says so. Returns are made
    from the raw advantages, whatever `normalize` does.

    Args:
        discount: γ in [0, 1].
        trace_decay: λ in [0, 1], of the advantages.
        value_trace_decay: λ of the value targets; None takes ``trace_decay``.
        adaptive_alpha: α of the length-adaptive λ ``1 − 1/(α·length)`` of the advantages, in place of
            ``trace_decay``; the value targets then use ``value_trace_decay`` or ``trace_decay``.
        weights: One weight per reward, in column order or by name; None weighs all 1.
        reward_scope: ``"segment"``: every sequence is a trajectory with its own reward. ``"session"``: the
            sequences of a session, in the order given, are one trajectory with one reward at its end.
            ``"session_replicated"``: each sequence is a trajectory and receives the session's reward.
        observations: ``"skip"``, or the other conventions of the field, ``"zero_value"`` and ``"step"``
            (see `lambda_returns`). Only ``"step"`` reads values under a false mask.
        kl_coef: β ≥ 0 of a penalty ``β·k(ℓ − ℓʳᵉᶠ)`` in the token rewards.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        on_lost_reward: ``"error"`` or ``"drop"`` for a reward other than 0 without an action token.
        on_observation_reward: ``"error"``, ``"credit"`` or ``"drop"`` for a token reward other than 0 at a place that is
            no action (see `token_rewards`); ``"credit"`` adds it to the last action token before it.
        normalize: ``"none"``, or ``"window"`` to whiten advantages over the window's tokens.
        ddof: 1 sample, 0 population variance of that whitening.
        epsilon: Its stability constant.
        epsilon_mode: ``"add"`` (std + ε), ``"variance"`` (√(var + ε)) or ``"floor"`` (√max(var, ε)).

    Raises:
        CapabilityError: If an option is out of range, a reward is lost, or a session contradicts itself.
        MissingColumnError: Without values, or without what a chosen option reads.

    Source:
        arXiv:1506.02438; separate and length-adaptive λ: VAPO, arXiv:2504.05118. verl always whitens (these
        constants) and leaves ``A + V`` in the returns of observation tokens; OpenRLHF is ``"zero_value"`` with
        ``ddof=0, epsilon_mode="floor"``; slime and oat are ``"step"``. AReaL bootstraps what has no end token.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True]]))
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]), layout=layout,
        ...     values=torch.tensor([[0.1, 0.2]], dtype=torch.float64),
        ... )
        >>> GAE(discount=0.9, trace_decay=0.8).estimate(rollouts)
        tensor([[0.6560, 0.8000]], dtype=torch.float64)
    """

    refuses: ClassVar[frozenset[str]] = frozenset({"unscored_sequences"})
    capabilities: ClassVar[Capabilities] = Capabilities(supports_context_parallel=False)
    reads = ("values", *AT_TOKENS, *AT_THE_END)
    token_level: ClassVar[bool] = True
    examples = ({"trace_decay": 0.9, "discount": 0.95}, {"kl_coef": 0.1}, {"adaptive_alpha": 0.05})

    discount: float = option(1.0, low=0, high=1)
    trace_decay: float = option(1.0, low=0, high=1)
    value_trace_decay: float | None = option(None, low=0, high=1)
    adaptive_alpha: float | None = option(None, low=0, open_low=True)
    reward_scope: Literal["segment", "session", "session_replicated"] = "segment"
    observations: Literal["skip", "zero_value", "step"] = "skip"
    kl_coef: float = option(0.0, low=0)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    on_lost_reward: Literal["error", "drop"] = "error"
    on_observation_reward: Literal["error", "credit", "drop"] = "error"

    def declared_reads(self) -> tuple[Read, ...]:
        """A critic's values and what is known of the end; sessions, and a reference policy, where options read them."""
        names = ("old_logprobs", "ref_logprobs") if self.kl_coef > 0.0 else ()
        sessions = () if self.reward_scope == "segment" else ("session_ids",)
        return (*super().declared_reads(), *map(read, (*names, *sessions)))

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Raw advantages, shaped like the mask, in the precision of the values. Scope: trajectory."""
        return self._credit(rollouts, adaptive=True).advantages

    def value_targets(self, rollouts: Rollouts) -> Tensor:
        """Raw returns at action tokens, 0 elsewhere, with the λ of the critic."""
        return self._credit(rollouts, adaptive=False).returns

    def credit(self, rollouts: Rollouts) -> Credit:
        """Advantages and value targets together; one pass when they share λ."""
        credit = self._credit(rollouts, adaptive=True)
        if self.adaptive_alpha is None and self.value_trace_decay in (None, self.trace_decay):
            return credit
        return credit._replace(returns=self.value_targets(rollouts))

    def _credit(self, rollouts: Rollouts, *, adaptive: bool) -> Credit:
        layout, values = rollouts.tokens("GAE"), rollouts.need("values", "GAE")
        whole = concatenate(rollouts, "GAE") if self.reward_scope == "session" else None
        given = token_rewards(rollouts, "GAE", self.on_observation_reward, self.on_lost_reward, whole)
        shaped = shaped_token_rewards(rollouts, given, self.kl_coef, self.kl_estimator, "GAE")
        if whole is None:
            final = final_rewards(self._rewards(rollouts), rollouts, self.discount, "GAE")
            return self._returns(layout, values, shaped, final, adaptive)
        flat = self._returns(
            whole.layout,
            whole.gather(values),
            None if shaped is None else whole.gather(shaped),
            self._session_final(rollouts, whole),
            adaptive,
        )
        return Credit(*(whole.scatter(column, layout.mask) for column in flat))

    def _returns(
        self, layout: TokenLayout, values: Tensor, shaped: Tensor | None, final: Tensor, adaptive: bool
    ) -> Credit:
        decay: float | Tensor = self.trace_decay
        if not adaptive and self.value_trace_decay is not None:
            decay = self.value_trace_decay
        elif adaptive and self.adaptive_alpha is not None:
            decay = adaptive_trace_decay(layout.token_counts(), self.adaptive_alpha)
        return lambda_returns(
            layout,
            values=values,
            token_rewards=shaped,
            final_rewards=final,
            discount=self.discount,
            trace_decay=decay,
            observations=self.observations,
        )

    def _rewards(self, rollouts: Rollouts) -> Tensor:
        if self.reward_scope == "segment":
            return sequence_rewards(rollouts, self.combined(rollouts), "GAE", self.on_lost_reward)
        rewards = session_rewards(rollouts, self.reward_weights(rollouts.reward_names or ()), "GAE")
        sessions = rollouts.sessions
        assert sessions is not None and rollouts.scored is not None

        layout = rollouts.tokens("GAE")

        def by_session(column: Tensor) -> Tensor:
            counted = torch.where(layout.sequence_mask(), column.double(), 0.0)
            return rewards.new_zeros(rewards.shape).index_add_(0, sessions.index, counted)

        # A session has its reward where any of its sequences has one.
        if self.on_lost_reward == "error" and rollouts.uncredited:
            refuse_lost_rewards(rewards, by_session(layout.local_counts()), "GAE", sessions.ids)
        if rollouts.unscored:
            counts, scored = by_session(layout.local_counts()), by_session(rollouts.scored.any(1)) > 0
            refuse_unscored(scored, counts, "GAE", sessions.ids)
        return rewards[sessions.index]

    def _session_final(self, rollouts: Rollouts, whole: Trajectories) -> Tensor:
        # A session goes on after its last sequence only if that one was cut off.
        return final_rewards(self._rewards(rollouts), rollouts, self.discount, "GAE")[whole.last]
