"""What is reported about importance ratios, for every loss that takes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlobjectives.component import Metric
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, Ratio
from rlobjectives.statistics import Maximum, Mean, Moments, Stat

__all__ = ["CLIP_METRICS", "HELD_METRICS", "RATIO_METRICS", "WEIGHT_METRICS", "clip_metrics", "ratio_metrics"]

RATIO_METRICS: Mapping[str, Metric] = {
    "policy/ratio_": Metric(Moments, "ratio", "importance ratio to the old policy, mean and std"),
    "policy/ratio_max": Metric(Maximum, "ratio", "largest importance ratio"),
    "policy/kl_to_old": Metric(Mean, "nats/token", "k3 estimate of the divergence to the old policy"),
}
CLIP_METRICS: Mapping[str, Metric] = {
    "policy/clip_fraction": Metric(Mean, "fraction", "tokens whose clipped branch is active (no gradient)"),
    "policy/clip_low_fraction": Metric(
        Mean, "fraction", "tokens clipped at the lower bound (negative advantage)"
    ),
    "policy/clip_high_fraction": Metric(
        Mean, "fraction", "tokens clipped at the upper bound (positive advantage)"
    ),
}
HELD_METRICS: Mapping[str, Metric] = {
    "policy/dual_clip_fraction": Metric(Mean, "fraction", "tokens held by the dual clip or the ratio cap"),
}

WEIGHT_METRICS: Mapping[str, Metric] = {
    "policy/weight_bounded_fraction": Metric(
        Mean, "fraction", "tokens whose importance weight is held by a bound (they keep a gradient)"
    ),
}


def ratio_metrics(ratio: Ratio, mask: Tensor) -> dict[str, Stat]:
    """Mean, spread, maximum and k3 of a ratio over the counted tokens."""
    log = ratio.log.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {
        "policy/ratio_": Moments.of(ratio.value, mask),
        "policy/ratio_max": Maximum.of(ratio.value, mask),
        "policy/kl_to_old": Mean.of(torch.expm1(log) - log, mask),
    }


def clip_metrics(clipped: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Stat]:
    """Fractions of the counted tokens whose bound is active, by the sign of the advantage."""
    low, high = clipped & (advantages < 0), clipped & (advantages > 0)
    return {
        "policy/clip_fraction": Mean.of(clipped, mask),
        "policy/clip_low_fraction": Mean.of(low, mask),
        "policy/clip_high_fraction": Mean.of(high, mask),
    }
