"""What a TRL configuration says about the trainer, in the words objectives are checked against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.objective import Objective

__all__ = ["is_stale", "trainer_facts", "updates_per_rollout", "violations"]


def updates_per_rollout(accumulation: int, steps_per_generation: int, num_iterations: int) -> int:
    """Most optimizer steps that any one generation batch takes part in.

    Args:
        accumulation: Micro-batches of an optimizer step.
        steps_per_generation: Micro-batches of a generation batch.
        num_iterations: Passes over each generation batch.

    Example:
        >>> updates_per_rollout(4, 4, 1), updates_per_rollout(2, 4, 1), updates_per_rollout(3, 2, 1)
        (1, 2, 2)
    """
    length = steps_per_generation * num_iterations
    starts = range(0, math.lcm(accumulation, length), length)
    return max((start + length - 1) // accumulation - start // accumulation + 1 for start in starts)


def is_stale(config: Any) -> bool:
    """Whether the policy may move between sampling and training, so that old log-probabilities must be kept."""
    generation = config.steps_per_generation * config.num_iterations
    return bool(config.gradient_accumulation_steps % generation)


def trainer_facts(
    config: Any, *, num_rewards: int | None, has_rollout_func: bool = False, has_reference: bool = True
) -> TrainerFacts:
    """The facts, from the configuration alone.

    Args:
        config: `GRPOConfig` or `RLOOConfig`.
        num_rewards: Reward functions; None if an environment may add some.
        has_rollout_func: A user's sampler, which returns log-probabilities of what it sampled, and may return those
            of a teacher.
        has_reference: The trainer hands out reference log-probabilities.
    """
    sampling = {**vars(config), **(config.generation_kwargs or {})}
    sampler = config.use_vllm or has_rollout_func
    return TrainerFacts(
        num_generations=config.num_generations,
        num_rewards=num_rewards,
        updates_per_rollout=updates_per_rollout(
            config.gradient_accumulation_steps, config.steps_per_generation, config.num_iterations
        ),
        max_staleness=0,
        temperature=config.temperature,
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        min_p=sampling["min_p"],
        behavior_logprobs="sampled" if sampler else "untruncated",
        normalize_advantages=False,
        has_critic=False,
        has_reference=has_reference,
        has_teacher=has_rollout_func,
        can_prepass=True,
        context_parallel_size=1,
        whole_groups_per_window=config.gradient_accumulation_steps % config.steps_per_generation == 0,
        recomputes_loss=False,
        old_logprobs="recomputed",
        importance_correction=False,
    )


def violations(
    objective: Objective, config: Any, *, token_level: bool, liger_loss: bool, entropy_gradient: bool
) -> Iterable[str]:
    """What flags alone cannot say: settings of TRL that would change the objective behind its back.

    Args:
        objective: The objective.
        config: The trainer's configuration.
        token_level: Whether its estimator gives one advantage a token.
        liger_loss: Whether this TRL replaces the loss under ``use_liger_kernel``.
        entropy_gradient: Whether this TRL's entropies carry gradient.
    """
    kwargs = config.generation_kwargs or {}
    if kwargs.get("temperature", config.temperature) != config.temperature:
        yield (
            f"generation_kwargs samples at temperature {kwargs['temperature']}, but log-probabilities are taken at "
            f"{config.temperature}: every ratio would be wrong. Set temperature= itself."
        )
    penalty = kwargs.get("repetition_penalty", config.repetition_penalty)
    sampled = config.use_vllm
    if objective.capabilities.requires_sampled_distribution and penalty != 1.0 and not sampled:
        yield (
            f"repetition_penalty = {penalty} samples from another distribution than the log-probabilities are taken "
            "from, and its importance ratio needs the one that sampled. Set it to 1.0."
        )
    correction = getattr(objective, "correction", None)
    if (
        config.use_vllm
        and getattr(config, "vllm_importance_sampling_correction", False)
        and correction is None
    ):
        yield (
            "vllm_importance_sampling_correction is on, but the correction is a part of the objective here. Give "
            "Objective(correction=...), or set vllm_importance_sampling_correction=False."
        )
    if config.use_liger_kernel and liger_loss:
        yield "use_liger_kernel would replace the loss in this version of TRL. Turn it off, or use TRL 1.14 or newer."
    if objective.entropy_coef and not entropy_gradient:
        yield (
            f"entropy_coef = {objective.entropy_coef} needs entropies with gradient, which this version of TRL does "
            "not compute. Use TRL 1.8 or newer, or entropy_coef=0."
        )
    if getattr(config, "dynamic_sampling", "off") != "off" and token_level:
        yield (
            f"dynamic_sampling = {config.dynamic_sampling!r} judges prompt groups, but "
            f"{type(objective.estimator).__name__} gives one advantage a token. Set it to 'off'."
        )
    parallel = getattr(config, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "tp_enabled", False):
        yield "tensor parallelism (parallelism_config) is not supported: ranks share sequences. Set tp_size=1."
