"""Every option of `GRPOConfig` and `RLOOConfig`, and what becomes of it; checks and docs page read this table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rlobjectives.integrations.trl.agreeing import AGREEING, agrees
from rlobjectives.objective import Objective

__all__ = ["OPTIONS", "Option", "markdown", "option_violations"]

Fate = Literal["kept", "read", "carried over", "replaced"]


@dataclass(frozen=True, slots=True)
class Option:
    """What becomes of one option.

    Attributes:
        fate: ``"kept"``: TRL does with it what it always did. ``"read"``: the adapter reads it too.
            ``"carried over"``: it fills what the objective leaves open, and may not contradict it.
            ``"replaced"``: the objective says this now; a value that is neither TRL's default nor what the objective
            does anyway is refused.
        note: What to write instead, or what is worth knowing.
    """

    fate: Fate
    note: str = ""


def _kept(*names: str, note: str = "") -> dict[str, Option]:
    return {name: Option("kept", note) for name in names}


def _replaced(*names: str, by: str) -> dict[str, Option]:
    return {name: Option("replaced", by) for name in names}


OPTIONS: dict[str, Option] = {
    # Model and data
    **_kept("model_init_kwargs", "trust_remote_code", "cast_lm_head_to_fp32"),
    "disable_dropout": Option(
        "read", "With active dropout the adapter warns: old log-probabilities are noisy then."
    ),
    "router_aux_loss_coef": Option(
        "read",
        "The load-balancing loss of mixture-of-experts models is added as TRL does, averaged over the window's "
        "micro-batches. It is the one term that depends on the cut.",
    ),
    "num_generations": Option(
        "read", "Group size; the objective's smallest group size is checked against it."
    ),
    "num_generations_eval": Option(
        "read",
        "Below the objective's smallest group size the evaluation loss is 0 (rewards are still logged).",
    ),
    "max_completion_length": Option(
        "read", "Also the default budget of `FixedBudget(max_tokens=…)` when the objective is given by name."
    ),
    **_kept("ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of"),
    # Generation
    "generation_batch_size": Option("read", "Sets `steps_per_generation`."),
    "steps_per_generation": Option(
        "read",
        "May differ from `gradient_accumulation_steps`: the denominator is that of the optimizer step, not of the "
        "generation batch.",
    ),
    "num_iterations": Option(
        "read", "Above 1, old log-probabilities are kept; objectives without a ratio are refused."
    ),
    **{
        name: Option(
            "read", "A cut distribution is refused for objectives whose ratio is taken against the sampler."
        )
        for name in ("top_p", "top_k", "min_p", "repetition_penalty")
    },
    "temperature": Option("read", "Sampling and all log-probabilities use it."),
    "generation_kwargs": Option(
        "read",
        "Overrides of `top_p`, `top_k`, `min_p` count; another `temperature` is refused, and what else changes the "
        "distribution (`typical_p`, `do_sample`, `num_beams` …) is treated like `top_p`.",
    ),
    **_kept("chat_template_kwargs", "cache_implementation"),
    **_kept(
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
    ),
    "use_vllm": Option("read", "The sampler's log-probabilities become `behavior_logprobs`."),
    **_kept(
        "vllm_mode",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
    ),
    # The objective
    "loss_type": Option(
        "replaced", "the objective: `Objective.named(…)` or `Objective(policy_loss=…, reduction=…)`"
    ),
    "beta": Option(
        "carried over",
        "Becomes `KLPenalty(coef=beta)` when the objective has no `kl`; a `kl` of the objective makes TRL build the "
        "reference model (by the `beta` of the trainer's own copy of the configuration; yours stays as it is). Two "
        "different numbers are refused, and so is one beside an estimator that charges the divergence in the rewards "
        "(`kl_coef` of `reinforce_pp`). `RLOOTrainer` subtracts that divergence from the reward; here it is in the loss, "
        "and a warning says so.",
    ),
    "use_bias_correction_kl": Option(
        "read",
        "When `beta` is carried over: `ratio_k3` if true, else `k3`. Beside a `kl` of the objective, whose `estimator` says "
        "it, a value that is not TRL's default and contradicts it is refused.",
    ),
    "reward_weights": Option(
        "carried over",
        "Become the estimator's `weights` when it has none (so do the estimator's weights for TRL's reward metric); a reward "
        "of an environment weighs 1, as in TRL.",
    ),
    **_replaced("epsilon", by="`policy_loss={'clip_low': …}`"),
    **_replaced("epsilon_high", by="`policy_loss={'clip_high': …}` (for cispo: `{'ratio_cap': …}`)"),
    **_replaced("delta", by="`policy_loss={'ratio_cap': …}` of `ClippedSurrogate`"),
    **_replaced(
        "sapo_temperature_neg", "sapo_temperature_pos", by="the options of the `sapo` objective's policy loss"
    ),
    **_replaced(
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
        by="the options of the `vespo` objective's policy loss",
    ),
    **_replaced(
        "importance_sampling_level", by="a sequence-level policy loss, such as `Objective.named('gspo')`"
    ),
    **_replaced(
        "multi_objective_aggregation",
        by="the estimator: `GDPO` normalises each reward and then sums, `GRPO` sums first",
    ),
    **_replaced("scale_rewards", by="`estimator={'scale': 'group' | 'batch' | 'none'}` of `GRPO`"),
    "mask_truncated_completions": Option(
        "read",
        "Truncated completions are excluded from numerator and denominator; means over sequences still count them (`count='nonempty'` does not). "
        "TRL before 1.9 goes on dividing by their tokens.",
    ),
    **_kept("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    **_replaced(
        "top_entropy_quantile",
        by="`entropy_mask=EntropyMask(fraction=…)`, whose quantile is that of the whole window",
    ),
    **_replaced(
        "entropy_coef",
        by="`entropy_coef=…` of the objective (weighted by its reduction; TRL takes a mean over each micro-batch)",
    ),
    **_replaced(
        "use_adaptive_entropy",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
        "entropy_target",
        by="a constant `entropy_coef=…` of the objective",
    ),
    **_kept("max_tool_calling_iterations", note="Tool tokens (`tool_mask`) never carry loss."),
    "vllm_importance_sampling_correction": Option(
        "read",
        "With `use_vllm` it must be False, or the objective has to have a `correction` (`ImportanceCorrection`), "
        "which then does the work.",
    ),
    **_replaced(
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_cap",
        by="`correction=ImportanceCorrection(weight=…, outside=…, high=…)`",
    ),
    **_replaced("off_policy_mask_threshold", by="`off_policy_mask=OPSM(threshold=…, against='behavior')`"),
    # RLOOConfig only
    **_replaced("normalize_advantages", by="an estimator that whitens"),
    **_replaced("reward_clip_range", by="clipping inside the reward function"),
    # Logging
    **_kept(
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
    ),
}

INHERITED: dict[str, Option] = {
    "per_device_train_batch_size": Option(
        "read", "A micro-batch: how the window is cut, which changes nothing else."
    ),
    "gradient_accumulation_steps": Option(
        "read", "The window: one optimizer step over all of its micro-batches."
    ),
    "max_grad_norm": Option("kept", "Clips the exact gradient of the window's loss."),
    "use_liger_kernel": Option(
        "read", "Layer kernels are kept. Refused where it would replace the loss too (TRL up to 1.13)."
    ),
    "gradient_checkpointing": Option("kept"),
    "neftune_noise_alpha": Option(
        "read", "Warned of like dropout, and refused for objectives with a pass before their losses."
    ),
    "bf16": Option("kept", "Log-probabilities are raised to float32; statistics are float64."),
    "fp16": Option("kept", "A skipped step leaves the gradient scaler as it was."),
    "torch_compile": Option("kept", "Not tested; losses and estimators themselves are not compiled."),
    "fsdp": Option("kept", "Not tested."),
    "deepspeed": Option(
        "kept", "ZeRO 1 to 3. Write `gradient_clipping` into its config; DeepSpeed clips at 1.0 without."
    ),
    "eval_strategy": Option(
        "kept",
        "Evaluation uses the same objective, over one evaluation batch at a time; in `eval_loss` every sequence of the "
        "data set counts once, whatever the last batch holds.",
    ),
    "resume_from_checkpoint": Option(
        "kept",
        "A rollout that was not used up is stored in the checkpoint and continued, under the same settings only.",
    ),
    "logging_steps": Option("kept", "Metrics of the steps in between are weighted by what they counted."),
    "average_tokens_across_devices": Option("kept", "Without effect, here as in TRL."),
}
"""Inherited options worth a word; every other option of `TrainingArguments` is kept."""


def stock_defaults(config: Any) -> dict[str, Any]:
    """TRL's own default of each option, whatever a subclass of its config made of it."""
    stock = next(kind for kind in type(config).__mro__ if kind.__module__.startswith("trl."))
    found = {}
    for one in dataclasses.fields(stock):
        if one.default is not dataclasses.MISSING:
            found[one.name] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            found[one.name] = one.default_factory()
    return found


def option_violations(config: Any, objective: Objective | None = None) -> Iterable[str]:
    """One sentence for each option that would be ignored, naming what replaces it.

    Args:
        config: The trainer's configuration.
        objective: An option that says what it does anyway is accepted.
    """
    defaults = stock_defaults(config)
    for name, option in OPTIONS.items():
        value = getattr(config, name, None)
        if option.fate != "replaced" or name not in defaults or value == defaults[name]:
            continue
        if objective is None or not agrees(name, value, objective, config):
            yield f"{name} = {value!r} would have no effect. Its place is taken by {option.note}."


def markdown() -> str:
    """The table of the docs page."""
    rows = ["| option | | what becomes of it |", "|---|---|---|"]
    for name, option in {**OPTIONS, **INHERITED}.items():
        note = (
            f"Refused unless default{' or in agreement' if name in AGREEING else ''}; write {option.note}."
            if option.fate == "replaced"
            else option.note
        )
        rows.append(f"| `{name}` | {option.fate} | {note} |")
    return "\n".join(rows)
