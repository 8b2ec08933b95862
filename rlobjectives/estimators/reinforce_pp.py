"""REINFORCE++: KL-shaped returns (or group-centred rewards), whitened over the tokens of the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.component import WindowContext
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.group_advantages import grpo_estimate
from rlobjectives.maths.groups import check_singletons, group_any
from rlobjectives.maths.returns import lambda_returns
from rlobjectives.maths.shaping import sequence_rewards, shaped_token_rewards
from rlobjectives.maths.token_rewards import AT_TOKENS, token_rewards
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["ReinforcePlusPlus", "ReinforcePlusPlusBaseline"]


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(RewardWeights, Normalized):
    """Return of each action token under KL-shaped rewards, whitened over the window. No critic, no group.

        r̃ₖ = −β·k1(ℓₖ − ℓₖʳᵉᶠ) + [k = n]·R        Gₖ = r̃ₖ + γ·Gₖ₊₁        Â = (G − μ_W) / √max(σ²_W, ε)

    Observation tokens are skipped without a discount. A sequence without action tokens counts for nothing.

    Args:
        discount: γ in [0, 1].
        kl_coef: β ≥ 0; 0 needs no reference policy.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        weights: One weight per reward, in column order or by name; None weighs all 1.
        observations: ``"skip"``, or ``"step"`` to discount through masked tokens before the last action.
        on_lost_reward: ``"error"`` or ``"drop"`` for a reward other than 0 without an action token.
        on_observation_reward: ``"error"``, ``"credit"`` or ``"drop"`` for a token reward other than 0 at a place that is
            no action (see `token_rewards`); ``"credit"`` adds it to the last action token before it.
        normalize: ``"window"`` or ``"none"``.
        ddof: 0 population, 1 sample variance.
        epsilon: Stability constant.
        epsilon_mode: ``"floor"`` (√max(var, ε)), ``"variance"`` (√(var + ε)) or ``"add"`` (std + ε).

    Raises:
        CapabilityError: If an option is out of range, or a reward is lost.
        MissingColumnError: With ``kl_coef`` but without old or reference log-probabilities.

    Source:
        arXiv:2501.03262; constants as in OpenRLHF. verl: ``ddof=1, epsilon_mode="variance"``. Relax, slime and
        OpenRLHF discount through masked tokens: ``observations="step"``.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, -0.5]), group_ids=torch.tensor([0, 1]),
        ...     layout=PaddedLayout(torch.tensor([[True, True], [True, False]])),
        ... )
        >>> ReinforcePlusPlus(discount=0.9).estimate(rollouts)
        tensor([[ 0.9000,  1.0000],
                [-0.5000,  0.0000]], dtype=torch.float64)
    """

    refuses: ClassVar[frozenset[str]] = frozenset({"unscored_sequences"})
    capabilities: ClassVar[Capabilities] = Capabilities(
        supports_context_parallel=False, forbids_normalize_advantages=True
    )
    reads = AT_TOKENS
    token_level: ClassVar[bool] = True
    sums_rewards: ClassVar[bool] = True

    normalize: Literal["none", "window"] = "window"
    ddof: Literal[0, 1] = 0
    epsilon_mode: Literal["add", "variance", "floor"] = "floor"
    discount: float = option(1.0, low=0, high=1)
    kl_coef: float = option(0.0, low=0)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    observations: Literal["skip", "step"] = "skip"
    on_lost_reward: Literal["error", "drop"] = "error"
    on_observation_reward: Literal["error", "credit", "drop"] = "error"

    @property
    def compares_window(self) -> bool:
        """Whether every token of a sequence has the same return, which is whitened."""
        return self.normalize == "window" and self.discount == 1.0 and self.kl_coef == 0.0

    def declared_reads(self) -> tuple[Read, ...]:
        """Token rewards; log-probabilities of the old and the reference policy too, when the rewards are KL-shaped."""
        shaped = map(read, ("old_logprobs", "ref_logprobs") if self.kl_coef > 0.0 else ())
        return (*super().declared_reads(), *shaped)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Returns before whitening, shaped like the mask. Scope: sequence.

        Where several rewards are added up and will be whitened, ``[*tokens, 2]``: beside each return how far rounding
        may have moved its reward.
        """
        name, layout, reward = (
            "ReinforcePlusPlus",
            rollouts.tokens("ReinforcePlusPlus"),
            self.combined(rollouts),
        )
        given = token_rewards(rollouts, name, self.on_observation_reward, self.on_lost_reward)
        returns = lambda_returns(
            layout,
            token_rewards=shaped_token_rewards(rollouts, given, self.kl_coef, self.kl_estimator, name),
            final_rewards=sequence_rewards(rollouts, reward, name, self.on_lost_reward),
            discount=self.discount,
            observations=self.observations,
        ).returns
        return self._with_rounding(returns, None if reward.parts is None else reward.rounding, layout)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(RewardWeights, Normalized):
    """Group-centred reward of each sequence, whitened over the tokens of the window.

        Aᵢ = rᵢ − mean_g r        Âᵢ = (Aᵢ − μ_W) / √max(σ²_W, ε)        μ, σ over tokens: long answers weigh more

    No standard deviation of the group, and no KL in the advantage: add ``KLPenalty(estimator="k2")``. A
    group without spread, which says nothing about its answers, stays exactly 0 through the whitening (it
    still counts in μ and σ).

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.
        normalize: ``"window"`` or ``"none"``.
        ddof: 0 population, 1 sample variance.
        epsilon: Stability constant.
        epsilon_mode: ``"floor"`` (√max(var, ε)), ``"variance"`` (√(var + ε)) or ``"add"`` (std + ε).

    Raises:
        CapabilityError: On an option out of range, or a singleton group in the data.

    Source:
        arXiv:2501.03262. verl: ``ddof=1, epsilon_mode="variance"``. There, a group
        without spread gets −μ/σ. slime subtracts ``β·k1`` from each token's
        advantage before whitening; that is not this estimator.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> ReinforcePlusPlusBaseline().estimate(rollouts)[:, 0]
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)

    normalize: Literal["none", "window"] = "window"
    ddof: Literal[0, 1] = 0
    epsilon_mode: Literal["add", "variance", "floor"] = "floor"
    on_singleton: Literal["error", "zero"] = "error"

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """The centred reward, whether it is scored, and whether its group has any spread."""
        return ("advantage", "scored", "spread")

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """``[n, 3]``: centred reward, whether the sequence is scored, whether its group has spread. Scope: group."""
        check_singletons(rollouts, "ReinforcePlusPlusBaseline", self.on_singleton)
        reward = self.combined(rollouts)
        scored, tolerance = reward.scored, reward.tolerance()
        centred = grpo_estimate(reward.total, scored, rollouts, scale="none", tolerance=tolerance)
        spread = group_any(centred.squeeze(1) != 0, rollouts.groups).unsqueeze(1)
        return torch.cat([centred, scored.to(centred.dtype), spread.to(centred.dtype)], dim=1)

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Whiten over the window; groups without spread and unscored sequences stay exactly zero."""
        white = Normalized.finalize(self, estimate, layout, context)
        return torch.where(self.column(estimate, "spread") > 0, white, 0.0)
