"""What an objective reads and TRL cannot give, found by a dry run at set-up."""

from __future__ import annotations

from rlobjectives.capabilities import Capabilities
from rlobjectives.integrations import probe
from rlobjectives.objective import Objective

__all__ = ["missing_columns"]


def missing_columns(
    objective: Objective, reward_names: tuple[str, ...], num_generations: int
) -> tuple[str, ...]:
    """What the objective reads and TRL cannot give, or refuses, one sentence each.

    Args:
        objective: The parts.
        reward_names: Names of the reward functions.
        num_generations: Size of a prompt group.

    Example:
        >>> from rlobjectives import ReMax
        >>> missing_columns(Objective(estimator=ReMax()), ("right",), 2)[0][:26]
        'ReMax reads greedy_rewards'
    """
    return probe.missing_columns(
        objective,
        reward_names,
        num_generations,
        rollout_columns=_columns(objective.estimator.required()),
        token_columns={"entropy", *_columns(objective.capabilities)},
    )


def _columns(needs: Capabilities) -> set[str]:
    """Log-probabilities that TRL hands out; old ones are kept where others are needed."""
    flags = {
        "behavior_logprobs": needs.needs_behavior_logprobs,
        "ref_logprobs": needs.needs_ref_logprobs,
        "teacher_logprobs": needs.needs_teacher,
    }
    given = {name for name, needed in flags.items() if needed}
    return given | {"old_logprobs"} if given else given
