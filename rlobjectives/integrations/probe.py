"""A dry run of an objective over made-up numbers, to find out at set-up what would be missing at the first step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rlobjectives.distributed import LOCAL
from rlobjectives.errors import CapabilityError, MissingColumnError
from rlobjectives.estimators import Estimator, FunctionEstimator
from rlobjectives.layouts import PaddedLayout
from rlobjectives.objective import Objective
from rlobjectives.rollouts import Rollouts
from rlobjectives.tokens import TokenBatch

__all__ = ["ROLLOUT_COLUMNS", "missing_columns", "reads_column"]

ROLLOUT_COLUMNS = frozenset(
    {
        "values",
        "token_rewards",
        "old_logprobs",
        "ref_logprobs",
        "behavior_logprobs",
        "teacher_logprobs",
        "squared_probs",
        "session_ids",
        "greedy_rewards",
    }
)
"""Optional columns of `Rollouts` that an estimator may read."""

_WIDTH = 3


def missing_columns(
    objective: Objective,
    reward_names: tuple[str, ...] | None,
    num_generations: int,
    *,
    rollout_columns: Collection[str],
    token_columns: Collection[str],
) -> tuple[str, ...]:
    """What the objective reads and the trainer cannot give, or refuses, one sentence each.

    Capabilities say most of it; this finds the rest (a greedy answer's reward, probabilities over the whole
    vocabulary) without knowing any algorithm. A user's function is not called. Whatever else made-up numbers upset is
    left to the real ones.

    Args:
        objective: The parts.
        reward_names: Names of the reward functions; None where only the data tell. Then options are not judged.
        num_generations: Size of a prompt group.
        rollout_columns: Columns of `Rollouts` that the trainer gives.
        token_columns: Columns of `TokenBatch` that it gives, besides log-probabilities and advantages.

    Example:
        >>> from rlobjectives import ReMax
        >>> objective = Objective(estimator=ReMax())
        >>> missing_columns(objective, ("right",), 2, rollout_columns=(), token_columns=())[0][:26]
        'ReMax reads greedy_rewards'
    """
    estimator = objective.estimator
    rollouts = _rollouts(reward_names or _made_up_names(estimator), num_generations, rollout_columns)
    layout = rollouts.tokens("The dry run")
    assert isinstance(layout, PaddedLayout)
    numbers = _numbers(layout)
    try:
        if not isinstance(estimator, FunctionEstimator):
            estimate = estimator.estimate(rollouts)
        else:
            estimate = torch.zeros(layout.shape if estimator.token_level else layout.num_sequences).double()
        builder = objective.window(LOCAL)  # a matter of this rank alone
        prompts = layout.with_prompts(rollouts.group_ids)
        builder.add(estimate=estimate, layout=prompts)
        given: dict[str, Tensor] = {
            name: -numbers if name == "entropy" else numbers.clone() for name in token_columns
        }
        tokens = TokenBatch(**{**given, "logprobs": numbers}, layout=prompts)
        builder.add_prepass(tokens)
        window = builder.freeze()
        window.loss(tokens.replace(advantages=window.advantages(estimate, prompts)))
    except (MissingColumnError, CapabilityError) as error:
        judged = reward_names is not None or isinstance(error, MissingColumnError)
        return (str(error).replace("\n", " "),) if judged else ()
    except Exception:  # noqa: BLE001  # made-up numbers may fit no part of a user's own making; real ones will tell
        return ()
    return ()


def reads_column(
    estimator: Estimator, name: str, reward_names: tuple[str, ...] | None = None, num_generations: int = 2
) -> bool:
    """Whether an estimator cannot do without an optional column of `Rollouts`.

    Found by trying: with every other column it fails for want of this one. A user's function is not called.

    Args:
        estimator: The estimator.
        name: One of `ROLLOUT_COLUMNS`.
        reward_names: Names of the reward functions; None where only the data tell.
        num_generations: Size of a prompt group.

    Example:
        >>> from rlobjectives import GRPO, ReMax
        >>> reads_column(ReMax(), "greedy_rewards"), reads_column(GRPO(), "greedy_rewards")
        (True, False)
    """
    if isinstance(estimator, FunctionEstimator):
        return False
    try:
        names = reward_names or _made_up_names(estimator)
        estimator.estimate(_rollouts(names, num_generations, ROLLOUT_COLUMNS - {name}))
    except MissingColumnError:
        return True
    except Exception:  # noqa: BLE001  # as above
        return False
    return False


def _made_up_names(estimator: Estimator) -> tuple[str, ...]:
    """As many rewards as the estimator, or the first of those that it combines, has weights; else two, which all take."""
    parts = getattr(estimator, "estimators", (estimator,))
    weights = next((found for part in parts if (found := getattr(part, "weights", None))), (1.0, 1.0))
    return tuple(weights if isinstance(weights, dict) else (f"reward_{turn}" for turn in range(len(weights))))


def _rollouts(reward_names: tuple[str, ...], num_generations: int, columns: Collection[str]) -> Rollouts:
    count = 2 * num_generations
    layout = PaddedLayout(torch.ones(count, _WIDTH, dtype=torch.bool))
    rewards = torch.linspace(0.1, 1.0, count * len(reward_names)).reshape(count, -1)
    special = {
        "greedy_rewards": rewards,
        "session_ids": torch.arange(count),
        "truncated": torch.ones(count, dtype=torch.bool),
        "bootstrap_values": rewards[:, 0],
    }
    return Rollouts(
        rewards=rewards,
        group_ids=torch.arange(count) // num_generations,
        layout=layout,
        reward_names=reward_names,
        **{name: special.get(name, _numbers(layout)) for name in columns},  # type: ignore[arg-type]
    )


def _numbers(layout: PaddedLayout) -> Tensor:
    return torch.linspace(-2.0, -1.0, layout.num_sequences * _WIDTH).reshape(layout.shape)
