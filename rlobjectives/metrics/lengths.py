"""How long responses are, all of them and by whether they are correct."""

from __future__ import annotations

from torch import Tensor

from rlobjectives.checks import check_mask, check_shape
from rlobjectives.component import Metric
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Maximum, Moments, Stat

__all__ = ["LENGTH_METRICS", "length_metrics"]

LENGTH_METRICS = {
    "response/length_": Metric(Moments, "tokens", "action tokens of a response, mean and std"),
    "response/length_max": Metric(Maximum, "tokens", "longest response"),
    "response/correct_length_": Metric(Moments, "tokens", "length of correct responses, mean and std"),
    "response/incorrect_length_": Metric(Moments, "tokens", "length of incorrect responses, mean and std"),
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
        The ``response/…`` statistics of `LENGTH_METRICS`.

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
    check_shape("lengths", lengths, (rollouts.num_sequences,), "one length per sequence")
    assert rollouts.scored is not None
    counted = rollouts.genuine
    judged = counted & rollouts.scored[:, 0]
    if correct is None:
        correct = rollouts.rewards[:, 0] > 0
    check_mask("correct", correct, meaning="the response is right")
    check_shape("correct", correct, (rollouts.num_sequences,), "one flag per sequence")
    return {
        "response/length_": Moments.of(lengths, counted),
        "response/length_max": Maximum.of(lengths, counted),
        "response/correct_length_": Moments.of(lengths, judged & correct),
        "response/incorrect_length_": Moments.of(lengths, judged & ~correct),
    }
