"""GRPO and Dr.GRPO's centring: a reward against the other answers to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives._moved import moved_names
from rlobjectives.capabilities import Capabilities
from rlobjectives.component import WindowContext
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.group_advantages import grpo_estimate
from rlobjectives.maths.groups import check_singletons
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Moments, Stat

__all__ = ["GRPO"]


@dataclass(frozen=True, kw_only=True)
class GRPO(RewardWeights, Estimator):
    """Group-relative advantage: the reward minus its group's mean, over the group's std.

        rᵢ = Σₖ wₖ rᵢₖ        Aᵢ = (rᵢ − mean_g r) / (std_g r + ε)

    ``scale="none"`` is the centring of Dr.GRPO (whose other half is the `FixedBudget` reduction).
    A constant group gives exactly zero. A sequence without any scored reward gets zero and does not
    enter its siblings' baseline.

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        scale: ``"group"``, ``"batch"`` (std of raw rewards over the optimizer window) or ``"none"``.
        baseline: ``"inclusive"`` or ``"leave_one_out"``. Where the other completions are all equal (with
            two, always) they have no spread to divide by: then the difference itself is the advantage.
        epsilon: Stability constant in reward units.
        epsilon_mode: ``"add"`` (std + ε) or ``"clamp"`` (max(std, ε)).
        ddof: 1 sample, 0 population standard deviation.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: On an option out of range, or a singleton group in the data.

    Source:
        DeepSeekMath, arXiv:2402.03300 (gives no ε and no ddof); centring only: Dr.GRPO,
        arXiv:2503.20783. verl adds 1e-6, TRL 1e-4, OpenRLHF 1e-9 to the std; torchrl clamps. Their
        singleton is the raw reward (verl), 0 (TRL) or NaN. NeMo has the leave-one-out form.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> GRPO(scale="none").estimate(rollouts)
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2)
    examples = ({"weights": (1.0, -0.5)}, {"ddof": 0})

    scale: Literal["group", "batch", "none"] = "group"
    baseline: Literal["inclusive", "leave_one_out"] = "inclusive"
    epsilon: float = option(1e-6, low=0)
    epsilon_mode: Literal["add", "clamp"] = "add"
    ddof: Literal[0, 1] = 1
    on_singleton: Literal["error", "zero"] = "error"

    def required(self) -> Capabilities:
        """Dr.GRPO's centring fixes the scale, so nobody may whiten it; a window's std needs whole groups in it.

        A part of a group in a window may hold equal rewards only, whose std of zero would blow up advantages that
        are not zero.
        """
        own = Capabilities(
            forbids_normalize_advantages=self.scale == "none", supports_partial_window=self.scale != "batch"
        )
        return super().required().merge(own)

    def declared_statistics(self) -> dict[str, type[Stat]]:
        """The raw rewards' moments, when they are the scale."""
        return {"rewards": Moments} if self.scale == "batch" else {}

    @property
    def compares_window(self) -> bool:
        """Whether the window's standard deviation is the scale."""
        return self.scale == "batch"

    def few_samples(self, context: WindowContext) -> Tensor | None:
        """Whether the window's standard deviation is one of fewer than two rewards."""
        return context["rewards"].weight < 2 if self.scale == "batch" else None

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """For a batch scale also the raw reward and whether it is scored."""
        return ("advantage", "reward", "scored") if self.scale == "batch" else ()

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Group-relative advantages ``[n]`` (``[n, 3]`` under ``scale="batch"``)."""
        check_singletons(rollouts, "GRPO", self.on_singleton)
        reward = self.combined(rollouts)
        advantage = grpo_estimate(
            reward.total,
            reward.scored,
            rollouts,
            scale="group" if self.scale == "group" else "none",
            baseline=self.baseline,
            epsilon=self.epsilon,
            epsilon_mode=self.epsilon_mode,
            ddof=self.ddof,
            tolerance=reward.tolerance(),
        )
        if self.scale == "batch":
            return torch.cat([advantage, reward.total, reward.scored.double()], dim=1)
        return advantage.squeeze(1)

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Moments of the raw rewards of scored sequences, when they are the scale."""
        if self.scale != "batch":
            return {}
        counted = layout.sequence_mask() & (self.column(estimate, "scored") > 0)
        return {"rewards": Moments.of(self.column(estimate, "reward"), counted)}

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Divide by the window's standard deviation of raw rewards, when that is the scale."""
        del layout
        if self.scale != "batch":
            return estimate
        moments = context.get("rewards", Moments)
        std, centred = moments.std(self.ddof), self.column(estimate, "advantage")
        divisor = std + self.epsilon if self.epsilon_mode == "add" else std.clamp_min(self.epsilon)
        return torch.where(centred == 0, 0.0, centred / divisor)  # no reward differs: 0 even over 0


__getattr__ = moved_names(__name__)
