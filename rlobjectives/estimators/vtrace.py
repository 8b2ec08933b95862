"""V-trace: values and advantages of the current policy from samples of an older one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.returns import Credit, final_rewards
from rlobjectives.maths.shaping import sequence_rewards
from rlobjectives.maths.token_rewards import AT_THE_END, AT_TOKENS, token_rewards
from rlobjectives.maths.vtrace import vtrace_returns
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["VTrace"]


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
        weights: One weight per reward, in column order or by name; None weighs all 1.
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
        requires_sampled_distribution=True,
        supports_context_parallel=False,
    )
    reads = ("values", "old_logprobs", "behavior_logprobs", *AT_TOKENS, *AT_THE_END)
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
