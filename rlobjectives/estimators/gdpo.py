"""GDPO: standardise each reward by itself inside its group, add, then whiten over the window."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.component import Component, WindowContext
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.group_advantages import standardised
from rlobjectives.maths.groups import check_singletons, group_any, group_largest
from rlobjectives.maths.reward_sum import DOUBLE_UNIT, rounding_unit, weighted_columns
from rlobjectives.maths.whitening import whiten
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Moments, Stat

__all__ = ["GDPO"]

_ARITHMETIC = 32 * DOUBLE_UNIT
"""Rounding of a group's mean, its standard deviation and a weighted sum, relative to what was added up."""
_PROVABLE = 1.0 / 32
"""Share of its spread beyond which a column's own rounding no longer proves that it cancels others."""


def _check_weights(weights: tuple[float, ...]) -> None:
    narrow = torch.tensor(weights, dtype=torch.float64).float()
    for weight, used in zip(weights, narrow.tolist(), strict=True):
        if weight != 0.0 and (used == 0.0 or used in (float("inf"), float("-inf"))):
            raise CapabilityError(
                f"weights holds {weight!r}, which is {used:g} in float32, the precision advantages are "
                "used in. Choose weights between 1e-37 and 1e38 in size."
            )
    for (one, left), (two, right) in itertools.combinations(zip(weights, narrow.tolist(), strict=True), 2):
        if one != two and left == right:
            raise CapabilityError(
                f"weights holds {one!r} and {two!r}, which are the same number in float32. "
                "Weights that differ must differ there too."
            )
    if not any(weights):
        raise CapabilityError("weights are all zero: no reward would count. Give at least one weight.")


@dataclass(frozen=True, kw_only=True)
class GDPO(RewardWeights, Estimator):
    """Group reward-decoupled advantage for several rewards.

        zᵢₖ = (rᵢₖ − mean_g rₖ) / (std_g rₖ + ε)       Sᵢ = Σₖ wₖ zᵢₖ
        Aᵢ  = (Sᵢ − mean_W S) / (std_W S + ε)          W: all sequences of one optimizer step

    Weights multiply the *standardised* rewards. A column that is constant in a group gives exactly
    zero there and leaves the others' signal alone; a group in which every weighted column is
    constant gives exactly zero, also after whitening. With two rewards of equal weight whose sum is
    constant in a group, the columns cancel to exactly zero as well: that is the method, not an accident.

    Args:
        weights: One weight per reward, in the order of ``reward_names`` or by name; None weighs all 1.
        epsilon: Added to each group's standard deviation, in units of that reward.
        baseline: ``"inclusive"`` or ``"leave_one_out"`` mean (and std) of the group.
        whiten_unit: ``"sample"`` counts every sequence once; ``"token"`` counts its tokens (long
            answers weigh more); ``"none"`` leaves S as it is.
        whiten_epsilon: Stability constant of the whitening.
        whiten_mode: ``"add"`` (std + ε), ``"variance"`` (√(var + ε)) or ``"floor"``.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: With fewer than two rewards, weights that are all zero, not one a reward,
            named wrongly, or that vanish, overflow or coincide in float32; or a singleton group.

    Source:
        GDPO, arXiv:2601.05242, Eq. 4, 7 and 6 (as cited by its RFC). TRL 1.16 and NVlabs' TRL fork whiten
        samples over the *generation* batch with these constants. verl 0.9 whitens tokens: ``epsilon=1e-6,
        whiten_unit="token", whiten_mode="variance", whiten_epsilon=1e-8``. NeMo: leave-one-out, no ε.

    Example:
        >>> rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
        >>> GDPO(epsilon=0.0).estimate(Rollouts(rewards=rewards, group_ids=torch.tensor([0, 0])))[:, 0]
        tensor([ 0.7071, -0.7071], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)
    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {"combined": Moments}
    examples = ({"weights": (1.0, 0.5)}, {"weights": {"reward_1": 0.0, "reward_0": 2.0}})

    epsilon: float = option(1e-4, low=0)
    baseline: Literal["inclusive", "leave_one_out"] = "inclusive"
    whiten_unit: Literal["sample", "token", "none"] = "sample"
    whiten_epsilon: float = option(1e-4, low=0)
    whiten_mode: Literal["add", "variance", "floor"] = "add"
    on_singleton: Literal["error", "zero"] = "error"

    def check(self) -> None:
        """Weights are at least two, differ in float32 where they differ at all, and are not all zero."""
        super().check()
        if self.weights is not None:
            values = tuple(self.weights.values() if isinstance(self.weights, dict) else self.weights)
            self._check_count(len(values), "weights")
            _check_weights(values)

    @staticmethod
    def _check_count(count: int, what: str) -> None:
        if count < 2:
            raise CapabilityError(
                f"GDPO separates at least 2 rewards; {what} has {count}. Give every reward its own "
                "column, or choose GRPO for a single reward."
            )

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Rewards that do not match the weights, or are too few."""
        count = facts.num_rewards
        if count is not None and count < 2:
            yield f"GDPO separates at least 2 rewards; there is {count}. Add one, or choose GRPO."
            facts = replace(facts, num_rewards=None, reward_names=None)
        yield from super().conflicts(parts, facts)

    def reward_weights(self, names: tuple[str, ...]) -> tuple[float, ...]:
        """The weights in column order.

        Raises:
            CapabilityError: If there is not one weight for each named reward.
        """
        self._check_count(len(names), "rewards")
        return super().reward_weights(names) or (1.0,) * len(names)

    @property
    def compares_window(self) -> bool:
        """Whether S is whitened."""
        return self.whiten_unit != "none"

    def few_samples(self, context: WindowContext) -> Tensor | None:
        """Whether there are fewer than two sequences (or tokens) to whiten S over."""
        if self.whiten_unit == "none":
            return None
        return torch.minimum(context["combined"].weight, context.sequences) < 2

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """The sum, whether it is scored, and whether its group carries a signal."""
        return ("sum", "scored", "signal")

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Combined standardised rewards, before whitening.

        Returns:
            ``[n, 3]``: the sum S; whether any reward of the sequence is scored; whether its group
            carries any signal. Scope: group.
        """
        weights = self.reward_weights(rollouts.reward_names or ())
        check_singletons(rollouts, "GDPO", self.on_singleton)
        assert rollouts.scored is not None
        columns, divisor = standardised(
            rollouts.rewards,
            rollouts.scored,
            rollouts.groups,
            scale="group",
            baseline=self.baseline,
            epsilon=self.epsilon,
        )
        assert isinstance(divisor, Tensor)
        combined = weighted_columns(columns, weights)
        combined = torch.where(self._cancel(rollouts, columns, divisor, combined, weights), 0.0, combined)
        signal = group_any(combined != 0, rollouts.groups).double()
        counted = rollouts.scored.any(1).to(torch.float64)
        return torch.stack([combined, counted, signal], dim=1)

    def _cancel(
        self,
        rollouts: Rollouts,
        columns: Tensor,
        divisor: Tensor,
        combined: Tensor,
        weights: tuple[float, ...],
    ) -> Tensor:
        """Whether a sequence's group has columns that cancel in every member, rounding aside; bool ``[n]``.

        Rewards that are off by δ move a standardised one by at most ``(2δ + √2·|z|·δ) / std``; without a column beside
        it, nothing cancels. The bound is the group's: a member at the mean has next to none of its own.
        """
        groups, scored = rollouts.groups, rollouts.scored
        assert scored is not None and rollouts.reward_dtype is not None
        live = group_largest(columns.abs(), scored, groups) > 0
        unit = rounding_unit(rollouts.reward_dtype) + _ARITHMETIC
        error = unit * group_largest(rollouts.rewards.abs(), scored, groups)[groups.index] / divisor
        # Leave-one-out multiplies a deviation by c/(c − 1), which is at most 2.
        shift = 2.0 if self.baseline == "inclusive" else 4.0
        moved = (shift + 1.5 * columns.abs()) * error.clamp_max(_PROVABLE) + _ARITHMETIC * columns.abs()
        sizes = [abs(weight) for weight in weights]
        bound = weighted_columns(torch.where(live[groups.index], moved, 0.0), sizes)
        several = weighted_columns(live.double(), [float(size > 0.0) for size in sizes]) > 1
        known = scored.any(1, keepdim=True)
        pair = torch.stack([combined.abs(), bound], dim=1)
        size, noise = group_largest(pair, known.expand_as(pair), groups).unbind(1)
        return (several & (size <= noise))[groups.index]

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Moments of S over the window's sequences (or tokens)."""
        combined, scored = self.column(estimate, "sum"), self.column(estimate, "scored") > 0
        if self.whiten_unit == "token":
            counted = layout.mask & layout.expand(scored)
            return {"combined": Moments.of(layout.expand(combined), counted)}
        return {"combined": Moments.of(combined, scored & layout.sequence_mask())}

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Whiten S over the window; groups without signal and unscored sequences stay exactly zero."""
        del layout
        combined, scored, signal = estimate.unbind(1)
        if self.whiten_unit == "none":
            return combined
        moments = context.get("combined", Moments)
        white = whiten(combined, moments, ddof=1, epsilon=self.whiten_epsilon, mode=self.whiten_mode)
        return torch.where((scored > 0) & (signal > 0), white, 0.0)
