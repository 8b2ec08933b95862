"""What people watch about credit: baselines and dead groups, the critic's fit, lengths.

All from raw rewards and raw returns, so that the numbers mean the same under every estimator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_mask, check_shape
from rlobjectives.component import Metric
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.groups import group_moments
from rlobjectives.estimators.grpo import combined_reward
from rlobjectives.layouts import TokenLayout
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Maximum, Mean, Moments, Stat

__all__ = [
    "CREDIT_METRICS",
    "ExplainedVariance",
    "group_metrics",
    "length_metrics",
    "value_metrics",
]


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
    def measured(self) -> Tensor:
        """Whether the targets vary."""
        return self.row[2] > 0

    @classmethod
    def fold_rows(cls, rows: Tensor) -> Tensor:
        """Fold both moments."""
        return torch.cat([Moments.fold_rows(rows[:, :3]), Moments.fold_rows(rows[:, 3:])])

    def report(self, name: str) -> dict[str, Tensor]:
        """The explained share under ``name``."""
        return {name: self.value}


CREDIT_METRICS = {
    "group/baseline_mean": Metric(Mean, "reward", "mean of the other answers' reward, over scored sequences"),
    "group/advantage_abs_mean": Metric(Mean, "reward", "distance of a reward to the others' mean"),
    "group/no_signal_token_fraction": Metric(
        Mean, "fraction", "tokens in groups whose rewards do not differ"
    ),
    "group/empty_response_fraction": Metric(Mean, "fraction", "sequences without an action token"),
    "group/zero_advantage_fraction": Metric(Mean, "fraction", "groups whose rewards do not differ"),
    "group/dropped_fraction": Metric(Mean, "fraction", "groups that were filtered out before"),
    "value/explained_variance": Metric(
        ExplainedVariance, "fraction", "share of the returns the critic explains"
    ),
    "value/prediction_": Metric(Moments, "reward", "critic values over tokens, mean and std"),
    "value/target_": Metric(Moments, "reward", "raw returns over tokens, mean and std"),
    "response/length_": Metric(Moments, "tokens", "action tokens of a response, mean and std"),
    "response/length_max": Metric(Maximum, "tokens", "longest response"),
    "response/correct_length_": Metric(Moments, "tokens", "length of correct responses, mean and std"),
    "response/incorrect_length_": Metric(Moments, "tokens", "length of incorrect responses, mean and std"),
}


def group_metrics(
    rollouts: Rollouts, weights: tuple[float, ...] | None = None, dropped_groups: int | None = None
) -> dict[str, Stat]:
    """How much the groups of these rollouts have to teach, from the raw combined rewards.

    Sequences that nobody scored have no baseline and are left out of it; so are those without a scored
    sibling.

    Args:
        rollouts: Whole prompt groups, with a layout.
        weights: Weight of each reward column, as the estimator's; None weighs all 1.
        dropped_groups: Groups that a filter took out before, on this rank; None where nobody counted them, which
            leaves ``group/dropped_fraction`` out.

    Returns:
        The ``group/…`` statistics of `CREDIT_METRICS`. Scope: what is merged later.

    Raises:
        MissingColumnError: Without a layout.
        CapabilityError: If ``dropped_groups`` is negative.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]),
        ...     layout=PaddedLayout(torch.tensor([[True], [True]])),
        ... )
        >>> group_metrics(rollouts)["group/advantage_abs_mean"].value
        tensor(1., dtype=torch.float64)
    """
    if dropped_groups is not None and dropped_groups < 0:
        raise CapabilityError(f"dropped_groups is {dropped_groups}; expected a count.")
    layout, groups = rollouts.tokens("group_metrics"), rollouts.groups
    rewards, scored = combined_reward(rollouts, weights)
    moments = group_moments(rewards, scored, groups)
    paired = (scored & (moments.count > 1)).squeeze(1)
    others = (moments.count * moments.mean - rewards) / (moments.count - 1.0).clamp_min(1.0)
    tokens, constant = layout.token_counts(), moments.constant.squeeze(1)
    dead = torch.zeros(groups.count, dtype=torch.float64, device=rewards.device)
    dead.index_copy_(0, groups.index, constant.double())
    silent = torch.stack([torch.where(constant, tokens, 0.0).sum(), tokens.sum()])
    distance = torch.where(moments.constant, 0.0, rewards - others).abs()
    found: dict[str, Stat] = {
        "group/baseline_mean": Mean.of(others.squeeze(1), paired),
        "group/advantage_abs_mean": Mean.of(distance.squeeze(1), paired),
        "group/no_signal_token_fraction": Mean(silent),
        "group/empty_response_fraction": Mean.of((tokens == 0).double(), layout.sequence_mask()),
        "group/zero_advantage_fraction": Mean.of(dead),
    }
    if dropped_groups is not None:
        dropped = torch.tensor([1.0] * dropped_groups + [0.0] * groups.count, dtype=torch.float64)
        found["group/dropped_fraction"] = Mean.of(dropped.to(rewards.device))
    return found


def value_metrics(values: Tensor, returns: Tensor, layout: TokenLayout) -> dict[str, Stat]:
    """How well a critic fits, over action tokens.

    Args:
        values: The critic's values, shaped like the mask.
        returns: Raw returns, from ``estimator.value_targets``, never normalised.
        layout: Where the tokens lie.

    Returns:
        The ``value/…`` statistics of `CREDIT_METRICS`.

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


def length_metrics(
    rollouts: Rollouts, correct: Tensor | None = None, lengths: Tensor | None = None
) -> dict[str, Stat]:
    """Lengths of responses, all and split by whether they are correct.

    Args:
        rollouts: Sequences with a layout.
        correct: Bool ``[n]``; by default, whether the sum of rewards is positive. Unscored sequences are
            left out of the split.
        lengths: Response tokens ``[n]``; by default, those the mask counts, which leaves out what it drops.

    Returns:
        The ``response/…`` statistics of `CREDIT_METRICS`.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]),
        ...     layout=PaddedLayout(torch.tensor([[True, True], [True, False]])),
        ... )
        >>> length_metrics(rollouts)["response/correct_length_"].mean
        tensor(2., dtype=torch.float64)
    """
    layout = rollouts.tokens("length_metrics")
    lengths = layout.token_counts() if lengths is None else lengths.double()
    check_shape("lengths", lengths, (rollouts.num_sequences,), "one length a sequence")
    rewards, scored = combined_reward(rollouts, None)
    counted = layout.sequence_mask()
    judged = counted & scored.squeeze(1)
    if correct is None:
        correct = rewards.squeeze(1) > 0
    check_mask("correct", correct)
    check_shape("correct", correct, (rollouts.num_sequences,), "one flag a sequence")
    return {
        "response/length_": Moments.of(lengths, counted),
        "response/length_max": Maximum.of(lengths, counted),
        "response/correct_length_": Moments.of(lengths, judged & correct),
        "response/incorrect_length_": Moments.of(lengths, judged & ~correct),
    }
