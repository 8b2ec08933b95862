"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.masking import select
from rlobjectives.maths.ratio_metrics import RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, token_ratio
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Stat
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["SAPO", "soft_gate"]


def soft_gate(ratio: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """``(4/τ)·σ(τ(ρ − 1))`` and its derivative ``4σ(1 − σ)``, which is 1 at ρ = 1.

    Args:
        ratio: Importance ratio ρ.
        temperature: τ > 0, broadcastable to it: how fast the gate closes.

    Returns:
        Gate and slope in ρ, without gradient.

    Example:
        >>> soft_gate(torch.tensor(1.0), torch.tensor(2.0))
        (tensor(1.), tensor(1.))
    """
    x = temperature * (ratio - 1.0)
    # σ(−x), not 1 − σ(x): the difference would round to 0 long before the product does.
    return torch.sigmoid(x) * 4.0 / temperature, 4.0 * torch.sigmoid(x) * torch.sigmoid(-x)


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """A sigmoid gate on the ratio: tokens far from the old policy fade out instead of being cut off.

        Lₜ = −(4/τ)·σ(τ(ρₜ − 1))·Aₜ        τ = τ_pos where A > 0, else τ_neg

    The slope is ``−4σ(1 − σ)·ρₜ·Aₜ``, which is ``−Aₜ`` on policy. The *value* there is ``−2Aₜ/τ``: it does
    not compare with PPO's, only the gradient does.

    Args:
        temperature_positive: τ for A > 0.
        temperature_negative: τ for A ≤ 0; larger, because pushing one token down raises all others.
        log_ratio_clamp: Bound on the log-ratio before ``exp``; the slope is 0 beyond.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        SAPO, arXiv:2511.20347, with `SequenceMean` (verl forces it, AReaL uses the token mean). Without a
        clamp on the log-ratio (TRL, Relax, Liger) the gradient is NaN from 88 nats on.

    Example:
        >>> SAPO().temperature_negative
        1.05
    """

    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    metrics: ClassVar[Mapping[str, Metric]] = {
        **RATIO_METRICS,
        "policy/gate": Metric(Mean, "fraction", "how open SAPO's gate is: 1 on policy, 0 far from it"),
    }

    temperature_positive: float = option(1.0, low=0, open_low=True)
    temperature_negative: float = option(1.05, low=0, open_low=True)
    log_ratio_clamp: float | None = option(LOG_RATIO_CLAMP, low=0, open_low=True)

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and ratio metrics of each token."""
        del context
        layout = tokens.layout
        ratio = token_ratio(tokens, self.log_ratio_clamp)
        advantages = layout.select(tokens.need("advantages", "SAPO")).to(ratio.value.dtype)
        temperature = torch.where(
            advantages > 0,
            torch.full_like(advantages, self.temperature_positive),
            self.temperature_negative,
        )
        gate, opening = soft_gate(ratio.value, temperature)
        slope = select(-opening * ratio.value * advantages, ratio.inside)
        opened: dict[str, Stat] = {"policy/gate": Mean.of(opening, layout.mask)}
        return TokenLoss(-gate * advantages, slope, {**ratio_metrics(ratio, layout.mask), **opened})
