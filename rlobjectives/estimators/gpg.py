"""GPG: centred rewards, scaled up by the share of the window that carries a signal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import WindowContext
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.groups import check_singletons, group_moments
from rlobjectives.options import option
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Mean, Stat

__all__ = ["GPG"]


@dataclass(frozen=True, kw_only=True)
class GPG(RewardWeights, Estimator):
    """Group policy gradient: the centred reward times α, which makes up for sequences without gradient.

        Aᵢ = α·(rᵢ − mean_g r) / F        α = N / max(1, number of sequences with a signal)

    N and the count are of the whole window, all ranks included. No standard deviation.

    Args:
        weights: One weight per reward, in column order or by name; None weighs all 1.
        count: What has a signal: ``"spread"``, a sequence whose group is not constant; or ``"nonzero"``, one
            whose raw reward is not 0 (always true of rewards in {−1, 1}).
        divisor: F > 0.
        on_singleton: ``"error"`` or ``"zero"`` for a prompt with one completion.

    Raises:
        CapabilityError: On a bad option, or a singleton group in the data.

    Source:
        arXiv:2504.02546. verl counts ``"nonzero"`` rewards, over one process's batch; its loss is plain
        ``−ℓA`` (`Reinforce`).

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> GPG().estimate(rollouts)[:, 0]
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2, forbids_normalize_advantages=True)
    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {"signal": Mean}

    count: Literal["spread", "nonzero"] = "spread"
    divisor: float = option(1.0, low=0, open_low=True)
    on_singleton: Literal["error", "zero"] = "error"

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """The centred reward, whether it is scored, and whether it has a signal."""
        return ("advantage", "scored", "signal")

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """``[n, 3]``: the centred reward over F; whether scored; whether it has a signal. Scope: group."""
        check_singletons(rollouts, "GPG", self.on_singleton)
        reward = self.combined(rollouts)
        moments = group_moments(reward.total, reward.scored, rollouts.groups, reward.tolerance())
        signal = ~moments.constant if self.count == "spread" else reward.nonzero()
        flags = [reward.scored.double(), (signal & reward.scored).double()]
        return torch.cat([moments.deviation / self.divisor, *flags], dim=1)

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """Share of scored sequences with a signal."""
        counted = layout.sequence_mask() & (self.column(estimate, "scored") > 0)
        return {"signal": Mean.of(self.column(estimate, "signal"), counted)}

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Multiply by α."""
        del layout
        signal, total = context["signal"].row.unbind()
        return self.column(estimate, "advantage") * (total / signal.clamp_min(1.0))
