"""How well a critic fits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_shape
from rlobjectives.component import Metric
from rlobjectives.layouts import TokenLayout
from rlobjectives.statistics import Moments, Stat

__all__ = ["VALUE_METRICS", "ExplainedVariance", "value_metrics"]

_ROUNDING = 2.0**-48
"""Spread, relative to the mean, below which targets vary by rounding alone."""


class ExplainedVariance(Stat):
    """``1 − Var(target − prediction) / Var(target)`` over any partition: the moments of both.

    1 is a perfect fit, 0 no better than a constant, below 0 worse. Not measured where targets do not vary.

    Example:
        >>> target, prediction = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0])
        >>> ExplainedVariance.between(target, prediction).value
        tensor(0., dtype=torch.float64)
    """

    width = 6
    __slots__ = ()

    @classmethod
    def between(cls, target: Tensor, prediction: Tensor, mask: Tensor | None = None) -> ExplainedVariance:
        """From the counted entries of two tensors of one shape."""
        check_shape("prediction", prediction, tuple(target.shape), "the shape of the targets")
        error = target.detach().double() - prediction.detach().double()
        return cls(torch.cat([Moments.of(target, mask).row, Moments.of(error, mask).row]))

    @property
    def value(self) -> Tensor:
        """The explained share; 0 where targets do not vary."""
        spread = torch.where(self.measured, self.row[2], 1.0)
        return torch.where(self.measured, 1.0 - self.row[5] / spread, 0.0)

    @property
    def weight(self) -> Tensor:
        """How many targets were counted."""
        return self.row[0]

    @property
    def measured(self) -> Tensor:
        """Whether the targets vary by more than rounding."""
        count, mean, m2 = self.row[:3].unbind()
        return m2 > count * (_ROUNDING * mean).square()

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Fold both moments."""
        return torch.cat([Moments.fold_rows(rows[:, :3]), Moments.fold_rows(rows[:, 3:])])

    def report(self, name: str) -> dict[str, Tensor]:
        """The explained share under ``name``."""
        return {name: self.value}


VALUE_METRICS = {
    "value/explained_variance": Metric(
        ExplainedVariance, "fraction", "share of the returns the critic explains"
    ),
    "value/prediction_": Metric(Moments, "reward", "critic values over tokens, mean and std"),
    "value/target_": Metric(Moments, "reward", "raw returns over tokens, mean and std"),
}


def value_metrics(values: Tensor, returns: Tensor, layout: TokenLayout) -> dict[str, Stat]:
    """How well a critic fits, over action tokens.

    Args:
        values: The critic's values, shaped like the mask.
        returns: Raw returns, from ``estimator.value_targets``, never normalised.
        layout: Where the tokens lie.

    Returns:
        The ``value/…`` statistics of `VALUE_METRICS`.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True]]))
        >>> returns = torch.tensor([[0.0, 2.0]])
        >>> value_metrics(returns, returns, layout)["value/explained_variance"].value
        tensor(1., dtype=torch.float64)
    """
    layout.check("values", values)
    layout.check("returns", returns)
    return {
        "value/explained_variance": ExplainedVariance.between(returns, values, layout.mask),
        "value/prediction_": Moments.of(values, layout.mask),
        "value/target_": Moments.of(returns, layout.mask),
    }
