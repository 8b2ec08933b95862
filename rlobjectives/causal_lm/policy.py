"""CausalLMPolicy: a Hugging Face causal language model that samples, is scored, and learns."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule
from torch import Tensor

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.causal_lm import language_models
from rlobjectives.causal_lm.behavior_policy import StaleSampling
from rlobjectives.causal_lm.optimizer import make_optimizer
from rlobjectives.causal_lm.policy_options import check_fits, check_optimizer_options
from rlobjectives.causal_lm.prompt_rollouts import PromptRollouts
from rlobjectives.causal_lm.rewards import RewardFunction, RewardFunctions
from rlobjectives.causal_lm.sampling import SamplingOptions
from rlobjectives.causal_lm.scoring import score_sequences
from rlobjectives.causal_lm.sharding import shard_blocks
from rlobjectives.causal_lm.transcript import Transcript
from rlobjectives.causal_lm.validation import CompletionValidation
from rlobjectives.checks import check_choice, check_number, check_positive_int
from rlobjectives.columns import COLUMNS
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.mixin import ObjectiveMixin
from rlobjectives.integrations.lightning.randomness import base_seed, derive_seed
from rlobjectives.integrations.snapshots import PolicySnapshots
from rlobjectives.objective import Objective
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat

__all__ = ["CausalLMPolicy"]


class CausalLMPolicy(PromptRollouts, ObjectiveMixin, StaleSampling, CompletionValidation, LightningModule):
    """Any causal language model of ``transformers``, trained with an objective on sampled completions.

    One step: take the batch's prompts, sample ``num_generations`` completions of each, score them with the
    reward functions, train. The end-of-sequence token is an action like any other; a completion cut at
    ``max_new_tokens`` has none.

    Log-probabilities are taken at the sampling temperature everywhere: policy, old, reference and behaviour
    alike. ``behavior_logprobs`` are those of the distribution that was sampled, `top_p` and `top_k` included;
    the trained policy's are not truncated, so with truncation an objective whose loss has an importance ratio
    is refused at set-up (one without, such as `Reinforce`, is not).

    The policy that samples may differ from the one that is trained, on purpose: by age (`snapshots`) or by
    temperature (`policy_temperature`). ``behavior_logprobs`` are then those of the sampler, and an objective
    that reads them nowhere is refused at set-up. ``rollout/policy_age`` tells the age of the sampling weights.

    Where the estimator reads the reward of a prompt's greedy answer (`ReMax`), each rollout completes every prompt
    greedily once more. A reward that could score only one of the two answers is left out of both.

    Validation completes every prompt greedily. It logs ``val/<reward>``, the mean of each reward over the
    prompts it could score, and ``val/accuracy``, the share of prompts whose first reward reaches
    `accuracy_threshold` among those it could score; both over all ranks and equal on each. A reward that gives None
    where an answer is wrong therefore hides it: return 0 there. With `val_samples` it also draws that many
    completions per prompt, as in training, and logs the same under ``val/sampled/``. ``rollout/accuracy`` is that of
    the completions of training, among those scored. Testing logs the same under ``test/``.

    Args:
        objective: What to train for.
        rewards: Reward functions or dotted paths to them, in the order of the estimator's weights:
            ``reward(prompts, completions, **columns)`` returns one number, or None, a completion.
        model_name_or_path: Name or folder of a pretrained model.
        model_config: ``model_type`` and configuration fields of a fresh model, instead.
        tokenizer_name_or_path: Tokenizer; by default that of `model_name_or_path`.
        gguf_file: Quantised weights inside `model_name_or_path`, expanded for training.
        dtype: Torch dtype of the weights.
        model_options: Further arguments of ``from_pretrained``.
        max_new_tokens: Longest completion in tokens.
        max_prompt_tokens: Longest prompt allowed, in tokens; None allows any.
        temperature: Sampling temperature.
        policy_temperature: Temperature of the policy that is trained: of its log-probabilities, the old and the
            reference's. None: the sampling temperature.
        top_p: Nucleus mass kept when sampling; 1 keeps all.
        top_k: Tokens kept when sampling; 0 keeps all.
        snapshots: Sample with earlier weights, kept at an interval up to a largest age. None: with the current.
        old_logprobs: What the ratios of most losses are taken against. ``"recomputed"``: the policy at the start
            of this rollout's updates. ``"behavior"``: the policy that sampled, as in M2PO's paper.
        reference: Keep a frozen copy of the starting policy. None: if the objective needs one. Every rank holds
            it whole; it is no part of the module, so neither sharded, saved nor trained.
        gather_for_sampling: Under ZeRO-3 and FSDP2, have the whole model on every rank while sampling, which is
            fast. False gathers layer by layer for every token, for models that do not fit on one device.
        gradient_checkpointing: Recompute activations in the backward to save memory.
        self_test: Before the first rollout, run `check_model` on the model as it trains: a few forwards of two short
            sequences. A model whose log-probabilities depend on padding or on being sampled is refused. A `complete`
            of your own is not run.
        learning_rate: Of AdamW, after the warm-up.
        weight_decay: Of AdamW, on matrices only.
        betas: Of AdamW.
        warmup_steps: Optimizer steps of linear warm-up.
        accuracy_threshold: First reward at which a completion counts as right; unscored ones count neither way.
        val_samples: Completions to draw per validation prompt, besides the greedy one.
        micro_batch_size: Most sequences in one forward and backward on one rank.
        **kwargs: The remaining arguments of `ObjectiveMixin`.

    Raises:
        CapabilityError: If an option is out of range, or the model is given twice or not at all.
        CapabilityError: If a reward or a model cannot be found, or the model does not fit its tokenizer or lengths.

    Example:
        >>> from rlobjectives import GDPO, Objective
        >>> policy = CausalLMPolicy(                                            # doctest: +SKIP
        ...     objective=Objective(estimator=GDPO(weights=(1.0, 0.5))),
        ...     rewards=["my_project.rewards.correct", "my_project.rewards.format"],
        ...     model_name_or_path="my-org/my-model", max_new_tokens=256)
    """

    # A model may lie in another place on each machine.
    may_differ: ClassVar[frozenset[str]] = frozenset({"model_name_or_path", "tokenizer_name_or_path"})

    def __init__(
        self,
        *,
        objective: Objective,
        rewards: list[str] | list[RewardFunction],
        max_new_tokens: int,
        model_name_or_path: str | None = None,
        model_config: dict[str, Any] | None = None,
        tokenizer_name_or_path: str | None = None,
        gguf_file: str | None = None,
        dtype: str = "float32",
        model_options: dict[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        temperature: float = 1.0,
        policy_temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        snapshots: PolicySnapshots | None = None,
        old_logprobs: Literal["recomputed", "behavior"] = "recomputed",
        reference: bool | None = None,
        gather_for_sampling: bool = True,
        gradient_checkpointing: bool = False,
        self_test: bool = True,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_steps: int = 0,
        accuracy_threshold: float = 1.0,
        val_samples: int = 0,
        micro_batch_size: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(objective=objective, micro_batch_size=micro_batch_size, **kwargs)
        check_optimizer_options(
            learning_rate=learning_rate, weight_decay=weight_decay, betas=betas, warmup_steps=warmup_steps
        )
        if max_prompt_tokens is not None:
            check_positive_int("max_prompt_tokens", max_prompt_tokens)
        self.sampling = SamplingOptions(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
        )
        if policy_temperature is not None:
            check_number("policy_temperature", policy_temperature, low=0.0, open_low=True)
        check_choice("old_logprobs", old_logprobs, ("recomputed", "behavior"))
        self.policy_temperature = temperature if policy_temperature is None else policy_temperature
        self.snapshots = snapshots
        self.old_logprobs = old_logprobs
        self.reward_functions = RewardFunctions(rewards)
        self.gather_for_sampling = gather_for_sampling
        self.self_test = self_test
        self.max_prompt_tokens = max_prompt_tokens
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_steps = warmup_steps
        tokenizer_source = tokenizer_name_or_path or model_name_or_path
        if tokenizer_source is None:
            raise CapabilityError(
                "A model made from model_config has no tokenizer. Give tokenizer_name_or_path."
            )
        self.tokenizer = language_models.build_tokenizer(
            tokenizer_source, gguf_file=None if tokenizer_name_or_path else gguf_file
        )
        self.model: Any = language_models.build_model(
            model_name_or_path=model_name_or_path,
            model_config=model_config,
            gguf_file=gguf_file,
            dtype=dtype,
            model_options=model_options,
            seed=derive_seed(base_seed(self.seed), "weights"),
        )
        check_fits(
            self.model, self.tokenizer, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens
        )
        self.model.train()  # from_pretrained gives evaluation mode
        self.end_ids = language_models.end_ids(self.model, self.tokenizer)
        self.has_reference = objective.capabilities.needs_ref_logprobs if reference is None else reference
        # In a list, which hides it from the module: strategies would shard it, checkpoints would hold it.
        self._reference = (
            [copy.deepcopy(self.model).eval().requires_grad_(False)] if self.has_reference else []
        )
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.last_rollout: Transcript | None = None
        self._rollout_statistics: dict[str, Stat] = {}
        self.prepare_validation(accuracy_threshold=accuracy_threshold, val_samples=val_samples)

    # What the trainer asks.

    def trainer_facts(self, datamodule: object | None = None) -> TrainerFacts:
        """What this module offers to the objective."""
        # With truncation the ratio's log-probabilities are of the whole distribution: see the class.
        return dataclasses.replace(
            super().trainer_facts(datamodule),
            num_rewards=len(self.reward_functions),
            reward_names=self.reward_functions.names,
            max_staleness=0 if self.snapshots is None else self.snapshots.max_staleness,
            old_logprobs=self.old_logprobs,
            temperature=self.sampling.temperature,
            policy_temperature=self.policy_temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            behavior_logprobs="untruncated" if self.sampling.truncates else "sampled",
        )

    def offers(self) -> dict[str, bool]:
        """All that is known of samples, their distribution, prompts and entropy; the reference's, if there is one."""
        given = (
            "logprobs old_logprobs behavior_logprobs entropy greedy_rewards prompt_tokens prompt_sequences"
        )
        return {name: name in given.split() for name in COLUMNS} | {"ref_logprobs": self.has_reference}

    def configure_optimizers(self) -> Any:
        """AdamW with a linear warm-up; override for another optimizer."""
        return make_optimizer(
            self.model,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
            warmup_steps=self.warmup_steps,
        )

    def configure_model(self) -> None:
        """Shard block by block where the strategy wants the module to do it itself (FSDP2)."""
        if self.device_mesh is not None:
            shard_blocks(self.model, self.device_mesh["data_parallel"])

    # The scoring forward, and what is right.

    def score(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of a micro-batch, and entropies where the objective needs them."""
        entropy = "entropy" in self.objective.columns()
        return score_sequences(self.model, micro_batch, temperature=self.policy_temperature, entropy=entropy)

    def correct(self, rollouts: Rollouts) -> Tensor:
        """Which completions count as right in the metrics: those whose first reward reaches `accuracy_threshold`."""
        return rollouts.rewards[:, 0] >= self.accuracy_threshold
