"""TD(λ): bootstrapped returns, with or without the critic as a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.returns import Credit, final_rewards, lambda_returns
from rlobjectives.maths.shaping import sequence_rewards
from rlobjectives.maths.token_rewards import AT_THE_END, AT_TOKENS, token_rewards
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["TDLambda"]


@dataclass(frozen=True, kw_only=True)
class TDLambda(RewardWeights, Normalized):
    """The λ-return of each action token, less the critic's value unless asked otherwise.

        Gₖ = rₖ + γ·[(1 − λ)·Vₖ₊₁ + λ·Gₖ₊₁]        Aₖ = Gₖ − Vₖ

    With ``baseline="values"`` this is GAE exactly (``G = A_GAE + V``); with ``"none"`` the return itself
    weighs the gradient: REINFORCE with bootstrapped returns.

    Args:
        discount: γ in [0, 1].
        trace_decay: λ in [0, 1].
        baseline: ``"values"`` or ``"none"``.
        weights: One weight per reward, in column order or by name; None weighs all 1.
        observations: ``"skip"``, ``"zero_value"`` or ``"step"`` (see `lambda_returns`).
        on_lost_reward: ``"error"`` or ``"drop"`` for a reward other than 0 without an action token.
        on_observation_reward: ``"error"``, ``"credit"`` or ``"drop"`` for a token reward other than 0 at a place that is
            no action (see `token_rewards`); ``"credit"`` adds it to the last action token before it.
        normalize: ``"none"``, or ``"window"`` to whiten over the window's tokens.
        ddof: 1 sample, 0 population variance of that whitening.
        epsilon: Its stability constant.
        epsilon_mode: ``"add"``, ``"variance"`` or ``"floor"``.

    Raises:
        CapabilityError: If an option is out of range, or a reward is lost.
        MissingColumnError: Without values.

    Source:
        Sutton and Barto, Reinforcement Learning, 2nd ed., Eq. 12.2. torchrl's ``TDLambdaEstimator`` has no
        masks: its ``done`` and ``terminated`` are this library's sequence ends and `Rollouts.truncated`.

    Example:
        >>> import torch
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]),
        ...     layout=PaddedLayout(torch.tensor([[True, True]])), values=torch.tensor([[0.1, 0.2]]),
        ... )
        >>> TDLambda(trace_decay=0.0, baseline="none").estimate(rollouts)
        tensor([[0.2000, 1.0000]])
    """

    refuses: ClassVar[frozenset[str]] = frozenset({"unscored_sequences"})
    capabilities: ClassVar[Capabilities] = Capabilities(supports_context_parallel=False)
    reads = ("values", *AT_TOKENS, *AT_THE_END)
    token_level: ClassVar[bool] = True

    discount: float = option(1.0, low=0, high=1)
    trace_decay: float = option(0.95, low=0, high=1)
    baseline: Literal["values", "none"] = "values"
    observations: Literal["skip", "zero_value", "step"] = "skip"
    on_lost_reward: Literal["error", "drop"] = "error"
    on_observation_reward: Literal["error", "credit", "drop"] = "error"

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Advantages (or returns), shaped like the mask, in the precision of the values."""
        credit = self._credit(rollouts)
        return credit.advantages if self.baseline == "values" else credit.returns

    def value_targets(self, rollouts: Rollouts) -> Tensor:
        """The λ-returns at action tokens, 0 elsewhere."""
        return self._credit(rollouts).returns

    def _credit(self, rollouts: Rollouts) -> Credit:
        rewards = sequence_rewards(rollouts, self.combined(rollouts), "TDLambda", self.on_lost_reward)
        return lambda_returns(
            rollouts.tokens("TDLambda"),
            values=rollouts.need("values", "TDLambda"),
            token_rewards=token_rewards(
                rollouts, "TDLambda", self.on_observation_reward, self.on_lost_reward
            ),
            final_rewards=final_rewards(rewards, rollouts, self.discount, "TDLambda"),
            discount=self.discount,
            trace_decay=self.trace_decay,
            observations=self.observations,
        )
