"""The optimal token baseline: one baseline per token, weighted by how uncertain each path has been."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read, read
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.maths.groups import check_singletons
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, clamp_around
from rlobjectives.maths.returns import lambda_returns
from rlobjectives.maths.shaping import sequence_rewards
from rlobjectives.maths.token_rewards import AT_TOKENS, token_rewards
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts

__all__ = ["OptimalTokenBaseline"]


@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(RewardWeights, Normalized):
    """Return to go minus a baseline for each step, shared by a prompt's answers at that step.

        wₖ = (1 − 2πₖ + Σᵥπ(v)²)·ρ̄ₖ²        Wₖ = Σ_{j ≤ k} wⱼ
        Bₖ = Σᵢ Gᵢₖ·Wᵢₖ / (Σᵢ Wᵢₖ + ε)        Aᵢₖ = Gᵢₖ − Bₖ

    Step k is the k-th *action* token, so observations and padding do not shift answers against each
    other. Where one answer is left, because the others were shorter, there is nothing to compare with:
    its baseline is 0 there. Where all answers have the same return, the advantage is exactly 0.

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        importance_clip: Upper bound of ρ̄, the ratio of the current policy to the sampler; None takes
            ρ̄ = 1 and needs no behaviour log-probabilities.
        baseline_epsilon: ε ≥ 0 in the baseline.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.
        on_lost_reward: ``"error"`` or ``"drop"`` for a reward other than 0 without an action token.
        on_observation_reward: ``"error"``, ``"credit"`` or ``"drop"`` for a token reward other than 0 at a place that is
            no action (see `token_rewards`); ``"credit"`` adds it to the last action token before it.
        normalize: ``"none"``, or ``"window"`` to whiten over the window's tokens.
        ddof: 1 sample, 0 population variance of that whitening.
        epsilon: Its stability constant.
        epsilon_mode: ``"add"``, ``"variance"`` or ``"floor"``.

    Raises:
        CapabilityError: If an option is out of range, a reward is lost, or a singleton group in the data.
        MissingColumnError: Without old log-probabilities or `Rollouts.squared_probs`.

    Source:
        As ``optimal_token_baseline`` in verl 0.9, which counts steps by column (the same where the mask has
        no holes), leaves a residue of ε where all returns are equal, and gives a lone answer its return.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> ones = torch.ones(2, 1)
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]),
        ...     layout=PaddedLayout(torch.tensor([[True], [True]])),
        ...     old_logprobs=-ones, squared_probs=0.5 * ones,
        ... )
        >>> OptimalTokenBaseline(baseline_epsilon=0.0).estimate(rollouts).flatten()
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, supports_context_parallel=False)
    reads = ("old_logprobs", "squared_probs", *AT_TOKENS)
    token_level: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = False
    zero_for_equal_rewards = False  # a position that one answer alone reaches has no baseline

    importance_clip: float | None = option(None, low=0, open_low=True)
    baseline_epsilon: float = option(1e-8, low=0)
    on_singleton: Literal["error", "zero"] = "error"
    on_lost_reward: Literal["error", "drop"] = "error"
    on_observation_reward: Literal["error", "credit", "drop"] = "error"

    def declared_reads(self) -> tuple[Read, ...]:
        """Probabilities; the sampler's too when the weights are importance-corrected."""
        corrected = () if self.importance_clip is None else (read("behavior_logprobs"),)
        return (*super().declared_reads(), *corrected)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Advantages, float64, shaped like the mask. Scope: group, step by step."""
        name = "OptimalTokenBaseline"
        layout, groups = rollouts.tokens(name), rollouts.groups
        check_singletons(rollouts, name, self.on_singleton)
        assert rollouts.scored is not None
        reward = self.combined(rollouts)
        returns = lambda_returns(
            layout,
            token_rewards=token_rewards(rollouts, name, self.on_observation_reward, self.on_lost_reward),
            final_rewards=sequence_rewards(rollouts, reward, name, self.on_lost_reward, unscored="zero"),
        ).returns.double()
        weight = layout.cumulative_sum(self._energy(rollouts))
        member = layout.mask & layout.expand(rollouts.scored.any(1))
        step = (layout.cumulative_sum(layout.mask.double()).long() - 1).clamp_min(0)
        place = (layout.expand(groups.index) * layout.width + step).reshape(-1)
        bins = groups.count * layout.width

        def pooled(column: Tensor) -> Tensor:
            chosen = torch.where(member, column, 0.0).reshape(-1)
            return column.new_zeros(bins).index_add_(0, place, chosen)[place].view(layout.shape)

        def extreme(how: str, worst: float) -> Tensor:
            chosen = torch.where(member, returns, worst).reshape(-1)
            return (
                returns.new_full((bins,), worst)
                .scatter_reduce(0, place, chosen, how)[place]
                .view(layout.shape)
            )

        answers = pooled(torch.ones_like(weight))
        total = pooled(weight) + self.baseline_epsilon  # 0 only where every path was certain, and ε is 0
        baseline = torch.where(
            total == 0, 0.0, pooled(returns * weight) / torch.where(total == 0, 1.0, total)
        )
        tolerance = reward.tolerance()
        near = 0.0 if tolerance is None else layout.expand(tolerance.squeeze(1)[groups.index])
        equal = (answers > 1) & (extreme("amax", -torch.inf) - extreme("amin", torch.inf) <= near)
        advantage = returns - torch.where(answers > 1, baseline, 0.0)
        alone = layout.expand((groups.sizes < 2)[groups.index])
        return torch.where(member & ~equal & ~alone, advantage, 0.0)

    def _energy(self, rollouts: Rollouts) -> Tensor:
        name = "OptimalTokenBaseline"
        layout = rollouts.tokens(name)
        old = layout.select(rollouts.need("old_logprobs", name).double())
        squared = layout.select(rollouts.need("squared_probs", name).double())
        energy = 1.0 - 2.0 * old.exp() + squared
        if self.importance_clip is not None:
            log = layout.select(old - rollouts.need("behavior_logprobs", name).double())
            clamp = clamp_around(LOG_RATIO_CLAMP, self.importance_clip)
            assert clamp is not None
            energy = energy * log.clamp(-clamp, clamp).exp().clamp_max(self.importance_clip).square()
        return energy
