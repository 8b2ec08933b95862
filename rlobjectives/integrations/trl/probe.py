"""A dry run of an objective over made-up numbers, to find out at set-up what would be missing at the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.errors import CapabilityError, MissingColumnError
from rlobjectives.estimators import FunctionEstimator
from rlobjectives.layouts import PaddedLayout
from rlobjectives.objective import Objective
from rlobjectives.rollouts import Rollouts
from rlobjectives.tokens import TokenBatch

__all__ = ["missing_columns"]


def missing_columns(
    objective: Objective, reward_names: tuple[str, ...], num_generations: int
) -> tuple[str, ...]:
    """What the objective reads and TRL cannot give, or refuses, one sentence each.

    Capabilities say most of it; this finds the rest (a greedy answer's reward, probabilities over the whole
    vocabulary) without knowing any algorithm. A user's function is not called.

    Args:
        objective: The parts.
        reward_names: Names of the reward functions.
        num_generations: Size of a prompt group.

    Example:
        >>> from rlobjectives import ReMax
        >>> missing_columns(Objective(estimator=ReMax()), ("right",), 2)[0][:26]
        'ReMax reads greedy_rewards'
    """
    count, width = 2 * num_generations, 3
    layout = PaddedLayout(torch.ones(count, width, dtype=torch.bool))
    groups = torch.arange(count) // num_generations
    numbers = torch.linspace(-2.0, -1.0, count * width).reshape(count, width)
    rewards = torch.linspace(0.1, 1.0, count * len(reward_names)).reshape(count, -1)

    def columns(needs: Capabilities) -> dict[str, Tensor]:
        flags = {"behavior_logprobs": needs.needs_behavior_logprobs, "ref_logprobs": needs.needs_ref_logprobs}
        given = {name: numbers for name, needed in flags.items() if needed}
        return {"old_logprobs": numbers, **given} if given else given

    try:
        estimate = torch.zeros(count, dtype=torch.float64)
        if isinstance(objective.estimator, FunctionEstimator):
            estimate = torch.zeros(layout.shape) if objective.estimator.token_level else estimate
        else:
            rollouts = Rollouts(
                rewards=rewards,
                group_ids=groups,
                layout=layout,
                reward_names=reward_names,
                **columns(objective.estimator.required()),  # type: ignore[arg-type]
            )
            estimate = objective.estimator.estimate(rollouts)
        builder = objective.window()
        prompts = layout.with_prompts(groups)
        builder.add(estimate=estimate, layout=prompts)
        tokens = TokenBatch(
            logprobs=numbers, layout=prompts, entropy=-numbers, **columns(objective.capabilities)
        )
        builder.add_prepass(tokens)
        window = builder.freeze()
        window.loss(tokens.replace(advantages=window.advantages(estimate, prompts)))
    except (MissingColumnError, CapabilityError) as error:
        return (str(error).replace("\n", " "),)
    return ()
