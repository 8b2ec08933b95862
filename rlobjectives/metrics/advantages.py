"""The distribution of the advantages that the losses read, over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.component import Metric
from rlobjectives.layouts import TokenLayout
from rlobjectives.masking import count
from rlobjectives.statistics import Maximum, Mean, Minimum, Moments, Stat

__all__ = ["ADVANTAGE_METRICS", "advantage_metrics"]


ADVANTAGE_METRICS = {
    "advantage/": Metric(Moments, "advantage", "advantages over tokens, mean and std"),
    "advantage/highest": Metric(Maximum, "advantage", "largest advantage of a token"),
    "advantage/lowest": Metric(Minimum, "advantage", "smallest advantage of a token"),
    "advantage/abs_mean": Metric(Mean, "advantage", "size of advantages over tokens"),
    "advantage/positive_fraction": Metric(Mean, "fraction", "tokens that are encouraged"),
    "advantage/negative_fraction": Metric(Mean, "fraction", "tokens that are discouraged"),
    "advantage/zero_fraction": Metric(Mean, "fraction", "tokens that are left alone"),
}


def advantage_metrics(advantages: Tensor, layout: TokenLayout) -> dict[str, Stat]:
    """The distribution of advantages over tokens. `Window.loss` reports it for every objective, as its policy loss
    reads them: in the precision of the log-probabilities, and with what a distillation term adds.

    Args:
        advantages: From `Window.advantages`, shaped like the mask.
        layout: Where the tokens lie.

    Returns:
        The ``advantage/…`` statistics of `ADVANTAGE_METRICS`. Scope: what is merged later.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True, False]]))
        >>> advantage_metrics(torch.tensor([[2.0, 0.0, 9.0]]), layout)["advantage/zero_fraction"].value
        tensor(0.5000, dtype=torch.float64)
    """
    layout.check("advantages", advantages)
    mask, kept = layout.mask, layout.select(advantages.detach())
    moments = Moments.of(kept, mask)
    positive, negative = count(kept > 0), count(kept < 0)

    def mean(total: Tensor) -> Mean:
        return Mean(torch.stack([total.to(torch.float64), moments.count]))

    return {
        "advantage/": moments,
        "advantage/highest": Maximum.of(kept, mask),
        "advantage/lowest": Minimum.of(kept, mask),
        "advantage/abs_mean": mean(kept.abs().sum(dtype=torch.float64)),
        "advantage/positive_fraction": mean(positive),
        "advantage/negative_fraction": mean(negative),
        "advantage/zero_fraction": mean(moments.count - positive - negative),
    }
