"""What a TRL configuration says about the trainer, in the words objectives are checked against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.columns import COLUMNS, TAUGHT
from rlobjectives.corrections import ImportanceCorrection
from rlobjectives.integrations.trl.columns import MADE
from rlobjectives.objective import Objective
from rlobjectives.terms import KLPenalty

__all__ = [
    "altered_sampling",
    "cut_sampling",
    "inherited_sampling",
    "is_stale",
    "trainer_facts",
    "updates_per_rollout",
    "violations",
]

_NEUTRAL: dict[str, object] = {
    "do_sample": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(
        (
            "top_h",
            "dola_layers",
            "exponential_decay_length_penalty",
            "bad_words_ids",
            "force_words_ids",
            "constraints",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "suppress_tokens",
            "begin_suppress_tokens",
            "sequence_bias",
            "watermarking_config",
        )
    ),
}
"""Options of generation that change which distribution is sampled, with the value that does not."""
_PARALLEL = {"tp": "tensor", "cp": "context", "sp": "sequence"}


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


def altered_sampling(config: Any) -> str | None:
    """The settings, besides ``top_p``, ``top_k`` and ``min_p``, that make samples another distribution's, in words.

    Args:
        config: `GRPOConfig` or `RLOOConfig`.

    Example:
        >>> from types import SimpleNamespace
        >>> kwargs = {"typical_p": 0.3, "num_beams": 1, "stop_strings": "end"}
        >>> altered_sampling(SimpleNamespace(generation_kwargs=kwargs, repetition_penalty=1.1))
        'repetition_penalty = 1.1, typical_p = 0.3'
    """
    kwargs = config.generation_kwargs or {}
    penalty = kwargs.get("repetition_penalty", config.repetition_penalty)
    found = [f"repetition_penalty = {penalty!r}"] if penalty not in (None, 1.0) else []
    for name, neutral in _NEUTRAL.items():
        value = kwargs.get(name, neutral)
        if value != neutral and (value is not None or name == "do_sample"):
            found.append(f"{name} = {value!r}")
    return ", ".join(found) or None


def cut_sampling(config: Any) -> dict[str, Any]:
    """What cuts the sampled distribution: ``top_p``, ``top_k`` and ``min_p``, overrides in ``generation_kwargs`` included.

    Args:
        config: `GRPOConfig` or `RLOOConfig`.
    """
    kwargs = config.generation_kwargs or {}
    return {name: kwargs.get(name, getattr(config, name, None)) for name in ("top_p", "top_k", "min_p")}


def inherited_sampling(generation_config: Any, config: Any, *, none_is_open: bool = True) -> str | None:
    """The settings of a model's own generation that ``generate`` takes up because TRL's leaves them open, in words.

    ``generate`` fills what it is not told with the model's ``generation_config``. TRL tells it the temperature, ``top_p``,
    ``top_k`` and ``repetition_penalty``, and ``min_p`` unless that is None.

    Args:
        generation_config: The model's, or None.
        config: `GRPOConfig` or `RLOOConfig`.
        none_is_open: Whether a None that TRL says leaves it to the model, as since transformers 5.

    Example:
        >>> from types import SimpleNamespace
        >>> own = SimpleNamespace(no_repeat_ngram_size=2, typical_p=0.3, min_p=None)
        >>> config = SimpleNamespace(min_p=None, generation_kwargs={"typical_p": 1.0})
        >>> inherited_sampling(own, config)
        'no_repeat_ngram_size = 2'
    """
    told = {"do_sample": True, "min_p": config.min_p, **(config.generation_kwargs or {})}
    found = []
    for name, neutral in {**_NEUTRAL, "min_p": 0.0}.items():
        value = getattr(generation_config, name, None)
        is_open = name not in told or (none_is_open and told[name] is None)
        if is_open and value is not None and value != neutral:
            found.append(f"{name} = {value!r}")
    return ", ".join(found) or None


def trainer_facts(
    config: Any,
    *,
    num_rewards: int | None,
    has_sampler: bool = False,
    has_teacher: bool = False,
) -> TrainerFacts:
    """The facts, from the configuration alone.

    Args:
        config: `GRPOConfig` or `RLOOConfig`.
        num_rewards: Reward functions; None if an environment may add some.
        has_sampler: vLLM or a user's ``rollout_func`` samples, and its log-probabilities are handed out.
        has_teacher: There is a ``rollout_func``, which may return a teacher's log-probabilities.
    """
    rows = getattr(config, "train_batch_size", None)  # of a process
    ranks = getattr(config, "world_size", 1)
    # Without a sampler that says what it drew from, `violations` refuses a cut in TRL's own words.
    sampling = cut_sampling(config) if has_sampler else {}
    return TrainerFacts(
        num_generations=config.num_generations,
        num_rewards=num_rewards,
        window_sequences=None if rows is None else rows * config.gradient_accumulation_steps * ranks,
        window_settings="per_device_train_batch_size × gradient_accumulation_steps × ranks",
        updates_per_rollout=updates_per_rollout(
            config.gradient_accumulation_steps, config.steps_per_generation, config.num_iterations
        ),
        max_staleness=0,
        temperature=config.temperature,
        top_p=sampling.get("top_p"),
        top_k=sampling.get("top_k"),
        min_p=sampling.get("min_p"),
        behavior_logprobs="sampled" if has_sampler else "untruncated",
        normalize_advantages=False,
        offers={name: name in MADE for name in COLUMNS} | {TAUGHT[0]: has_teacher},
        can_prepass=True,
        context_parallel_size=1,
        whole_groups_per_window=config.gradient_accumulation_steps % config.steps_per_generation == 0,
        recomputes_loss=False,
        old_logprobs="recomputed",
        importance_correction=False,
    )


def violations(
    objective: Objective,
    config: Any,
    *,
    liger_loss: bool,
    entropy_gradient: bool,
    has_sampler: bool = False,
    dynamic_sampling: str = "off",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Iterable[str]:
    """What flags alone cannot say: settings of TRL that would change the objective behind its back.

    Args:
        objective: The objective.
        config: The trainer's configuration.
        liger_loss: Whether this TRL replaces the loss under ``use_liger_kernel``.
        entropy_gradient: Whether this TRL's entropies carry gradient.
        has_sampler: Whether a sampler's own log-probabilities are handed out.
        dynamic_sampling: What happens to groups without signal.
        defaults: TRL's own default of each option.
    """
    kwargs = config.generation_kwargs or {}
    if kwargs.get("temperature", config.temperature) != config.temperature:
        yield (
            f"generation_kwargs samples at temperature {kwargs['temperature']}, but log-probabilities are taken at "
            f"{config.temperature}: every ratio would be wrong. Set temperature= itself."
        )
    needs, altered = objective.capabilities, altered_sampling(config)
    cut = TrainerFacts(**cut_sampling(config)).truncation()
    if needs.requires_sampled_distribution and cut and not has_sampler:
        yield (
            f"sampling is cut ({cut}), and its importance ratio needs the log-probabilities of the distribution that "
            "sampled. Leave that out (top_p=1.0, top_k=0, min_p=None), let a sampler return those log-probabilities "
            "(use_vllm, or a rollout_func that returns logprobs), or choose an objective without a ratio (reinforce)."
        )
    if needs.requires_sampled_distribution and altered and not has_sampler:
        yield (
            f"{altered}: samples come from another distribution than the log-probabilities are taken from, and its "
            "importance ratio needs the one that sampled. Leave that out, or let a sampler (use_vllm, rollout_func) "
            "return the log-probabilities of what it does."
        )
    correction = objective.correction
    if isinstance(correction, ImportanceCorrection) and not has_sampler:
        yield (
            f"{type(correction).__name__} weights tokens by the trainer's log-probabilities over the sampler's, and no "
            "sampler returns any here: the policy itself generates, and every weight would be 1. Leave correction "
            "out, or sample with GRPOTrainer and use_vllm=True or a rollout_func that returns logprobs."
        )
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
    if dynamic_sampling != "off" and objective.estimator.token_level:
        yield (
            f"dynamic_sampling = {dynamic_sampling!r} judges prompt groups, but "
            f"{type(objective.estimator).__name__} gives one advantage per token. Set it to 'off'."
        )
    told = getattr(config, "use_bias_correction_kl", None)
    usual = defaults.get("use_bias_correction_kl", told)
    kl = objective.kl
    if isinstance(kl, KLPenalty) and told != usual and told != (kl.estimator == "ratio_k3"):
        yield (
            f"use_bias_correction_kl = {told} contradicts the objective's kl ({kl}). Leave it out; the "
            'ratio is that of estimator="ratio_k3".'
        )
    noise = getattr(config, "neftune_noise_alpha", None)
    if noise and needs.needs_prepass:
        yield (
            f"it reads the window's log-probabilities in a pass before the losses, and with neftune_noise_alpha = "
            f"{noise} the two passes would see two different policies. Leave the noise out."
        )
    parallel = getattr(config, "parallelism_config", None)
    for short, name in _PARALLEL.items():
        if getattr(parallel, f"{short}_enabled", False):
            yield f"{name} parallelism (parallelism_config) is not supported: ranks share sequences. Set {short}_size=1."
