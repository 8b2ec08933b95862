"""What people watch about credit: baselines and dead groups, the critic's fit, lengths. From raw rewards and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.checks import check_mask, check_shape
from rlobjectives.component import Metric
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.groups import group_moments
from rlobjectives.estimators.reward_sum import combined_reward
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


CREDIT_METRICS = {
    "group/baseline_mean": Metric(Mean, "reward", "mean of the other answers' reward, over scored sequences"),
    "group/advantage_abs_mean": Metric(Mean, "reward", "distance of a reward to the others' mean"),
    "group/no_signal_token_fraction": Metric(Mean, "fraction", "tokens in groups without any advantage"),
    "group/empty_response_fraction": Metric(Mean, "fraction", "sequences without an action token"),
    "group/zero_advantage_fraction": Metric(Mean, "fraction", "groups without any advantage"),
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
    rollouts: Rollouts,
    estimator: Estimator | None = None,
    *,
    estimate: Tensor | None = None,
    dropped_groups: int | None = None,
    lengths: Tensor | None = None,
) -> dict[str, Stat]:
    """How much the groups of these rollouts have to teach.

    Baselines are those of the raw rewards, combined by the estimator's weights; which groups have anything to teach is
    judged by the estimator's advantages. Sequences that nobody scored have no baseline and are left out of it; so are
    those without a scored sibling. Dummies count for nothing.

    Args:
        rollouts: Whole prompt groups, with a layout.
        estimator: Reads the groups. One that compares no answers to one prompt (`GAE`, `BatchBaseline`) has none of
            these numbers, and only ``group/empty_response_fraction`` is left. Without an estimator, raw rewards that
            all weigh 1 are judged.
        estimate: What the estimator gave for them, where that is known already.
        dropped_groups: Groups that a filter took out before, on this rank; None where nobody counted them, which
            leaves ``group/dropped_fraction`` out.
        lengths: Response tokens ``[n]``; by default, those the mask counts, which leaves out what it drops.

    Returns:
        The ``group/…`` statistics of `CREDIT_METRICS`. Scope: what is merged later.

    Raises:
        MissingColumnError: Without a layout.
        CapabilityError: If ``dropped_groups`` is negative.
        ShapeError: If there is not one length a sequence.

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
    layout, genuine = rollouts.tokens("group_metrics"), rollouts.genuine
    if lengths is not None:
        check_shape("lengths", lengths, (rollouts.num_sequences,), "one length a sequence")
    tokens = layout.token_counts()
    empty = (tokens if lengths is None else lengths) == 0
    found: dict[str, Stat] = {"group/empty_response_fraction": Mean.of(empty.double(), genuine)}
    if estimator is None or estimator.compares_siblings:
        found.update(_signal(rollouts, estimator, estimate, tokens))
    if dropped_groups is not None:
        counted = rollouts.group_mask.sum(dtype=torch.float64)
        found["group/dropped_fraction"] = Mean(
            torch.stack([torch.full_like(counted, dropped_groups), counted + dropped_groups])
        )
    return found


def _signal(
    rollouts: Rollouts, estimator: Estimator | None, estimate: Tensor | None, tokens: Tensor
) -> dict[str, Stat]:
    groups, genuine, counted = rollouts.groups, rollouts.genuine, rollouts.group_mask
    assert rollouts.reward_names is not None
    weights = None if estimator is None else estimator.reward_weights(rollouts.reward_names)
    reward = combined_reward(rollouts, weights)
    rewards, scored = reward.total, reward.scored & genuine.unsqueeze(1)
    moments = group_moments(rewards, scored, groups, reward.tolerance())
    dead = moments.constants.squeeze(1)
    if estimator is not None and not estimator.token_level:
        dead = ~estimator.carries_signal(rollouts, estimate)
    paired = (scored & (moments.count > 1)).squeeze(1)
    others = (moments.count * moments.mean - rewards) / (moments.count - 1.0).clamp_min(1.0)
    distance = torch.where(moments.constant, 0.0, rewards - others).abs()
    silent = torch.where(dead[groups.index], tokens, 0.0).sum()
    return {
        "group/baseline_mean": Mean.of(others.squeeze(1), paired),
        "group/advantage_abs_mean": Mean.of(distance.squeeze(1), paired),
        "group/no_signal_token_fraction": Mean(torch.stack([silent, tokens.sum()])),
        "group/zero_advantage_fraction": Mean.of(dead.double(), counted),
    }


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
        correct: Bool ``[n]``; by default, whether the first reward is positive. Sequences that the first reward did not
            score are left out of the split, whatever this says of them.
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
    assert rollouts.scored is not None
    counted = rollouts.genuine
    judged = counted & rollouts.scored[:, 0]
    if correct is None:
        correct = rollouts.rewards[:, 0] > 0
    check_mask("correct", correct, meaning="the response is right")
    check_shape("correct", correct, (rollouts.num_sequences,), "one flag a sequence")
    return {
        "response/length_": Moments.of(lengths, counted),
        "response/length_max": Maximum.of(lengths, counted),
        "response/correct_length_": Moments.of(lengths, judged & correct),
        "response/incorrect_length_": Moments.of(lengths, judged & ~correct),
    }
