"""ReMax: the reward against that of the greedy answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.returns import lambda_returns
from rlobjectives.maths.reward_sum import combined_greedy
from rlobjectives.maths.shaping import sequence_rewards, shaped_token_rewards
from rlobjectives.maths.token_rewards import AT_TOKENS, token_rewards
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["ReMax"]


@dataclass(frozen=True, kw_only=True)
class ReMax(RewardWeights, Normalized):
    """Reward to go minus the reward of the greedy answer to the same prompt.

        Aₖ = Σ_{j ≥ k} r̃ⱼ − b        b: combined reward of the greedy answer

    The greedy answer is sampled once a prompt and scored by the same reward functions; without it there is
    no baseline, so a missing one is an error.

    Args:
        kl_coef: β ≥ 0 of a penalty ``β·k(ℓ − ℓʳᵉᶠ)`` in the token rewards.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
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
        MissingColumnError: Without `Rollouts.greedy_rewards`.

    Source:
        arXiv:2310.10505.

    Example:
        >>> import torch
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]), greedy_rewards=torch.tensor([0.4]),
        ...     layout=PaddedLayout(torch.tensor([[True, True]])),
        ... )
        >>> ReMax().estimate(rollouts)
        tensor([[0.6000, 0.6000]], dtype=torch.float64)
    """

    refuses: ClassVar[frozenset[str]] = frozenset({"unscored_sequences"})
    capabilities: ClassVar[Capabilities] = Capabilities(supports_context_parallel=False)
    reads = ("greedy_rewards", *AT_TOKENS)
    token_level: ClassVar[bool] = True
    sums_rewards: ClassVar[bool] = True

    kl_coef: float = option(0.0, low=0)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    on_lost_reward: Literal["error", "drop"] = "error"
    on_observation_reward: Literal["error", "credit", "drop"] = "error"

    @property
    def compares_window(self) -> bool:
        """Whether every token of a sequence has the same advantage, which is whitened."""
        return self.normalize == "window" and self.kl_coef == 0.0

    def declared_reads(self) -> tuple[Read, ...]:
        """Token rewards; log-probabilities of the old and the reference policy too, when the rewards are KL-shaped."""
        shaped = map(read, ("old_logprobs", "ref_logprobs") if self.kl_coef > 0.0 else ())
        return (*super().declared_reads(), *shaped)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Advantages, shaped like the mask; ``[*tokens, 2]`` where sums of several rewards will be whitened.

        Scope: sequence. A sum that only rounding tells from the greedy answer's is the same.
        """
        layout, reward = rollouts.tokens("ReMax"), self.combined(rollouts)
        greedy = combined_greedy(rollouts, self.reward_weights(rollouts.reward_names or ()), "ReMax")
        sampled = sequence_rewards(rollouts, reward, "ReMax", self.on_lost_reward)
        lead, rounding = sampled - greedy.total.squeeze(1), reward.rounding + greedy.rounding
        lead = torch.where(lead.abs() <= rounding.squeeze(1), 0.0, lead)
        given = token_rewards(rollouts, "ReMax", self.on_observation_reward, self.on_lost_reward)
        # Without a discount a baseline at every token is one at the end.
        advantages = lambda_returns(
            layout,
            token_rewards=shaped_token_rewards(rollouts, given, self.kl_coef, self.kl_estimator, "ReMax"),
            final_rewards=lead,
        ).returns
        return self._with_rounding(advantages, None if reward.parts is None else rounding, layout)
