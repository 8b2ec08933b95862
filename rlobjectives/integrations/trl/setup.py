"""What a trainer settles and refuses before its first step: bases, options, the objective, the model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import Trainer
from trl import GRPOConfig, RLOOConfig, RLOOTrainer

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.checks import check_positive_int
from rlobjectives.distributed import Fault, GradientScale, check_agreement
from rlobjectives.errors import CapabilityError
from rlobjectives.fit import check
from rlobjectives.integrations.dropout import largest_dropout
from rlobjectives.integrations.trl.agreement import run_options
from rlobjectives.integrations.trl.facts import (
    altered_sampling,
    inherited_sampling,
    trainer_facts,
    violations,
)
from rlobjectives.integrations.trl.objective_source import (
    ObjectiveLike,
    as_objective,
    carry_over,
    settle_sampling,
    settle_self_test,
    settled,
    with_environment_weights,
)
from rlobjectives.integrations.trl.options import option_violations, stock_defaults
from rlobjectives.integrations.trl.rollout import unique_names
from rlobjectives.integrations.trl.sampling import SamplingMixin, check_prompt

__all__ = ["SetupMixin", "check_bases", "check_prompts", "own_parameters", "too_few_prompts"]

_NONE_IS_OPEN = int(transformers.__version__.split(".")[0]) >= 5


def check_bases(kind: type, mixin: type) -> None:
    """Refuse bases of which something would not be used: the objective, or somebody's own loss.

    Args:
        kind: The user's class.
        mixin: `ObjectiveMixin`, one of its bases.

    Raises:
        CapabilityError: If a trainer stands before the mixin, or one behind it has a loss of its own.
    """
    place = kind.__mro__.index(mixin)
    before, behind = kind.__mro__[:place], kind.__mro__[place + 1 :]
    for base in before:
        if issubclass(base, Trainer) and not issubclass(base, mixin):
            raise CapabilityError(
                f"class {kind.__name__}: {base.__name__} stands before ObjectiveMixin, so it would train with TRL's "
                f"own loss. Write class {kind.__name__}(ObjectiveMixin, {base.__name__})."
            )
    for base in behind:
        if "_compute_loss" in vars(base) and not base.__module__.startswith("trl.trainer."):
            raise CapabilityError(
                f"class {kind.__name__}: {base.__name__}._compute_loss would have no effect, because the objective is "
                f"the loss. Make it a part of the objective; or, if it adds to super()._compute_loss, move it into "
                f"{kind.__name__}."
            )


def own_parameters(kind: type) -> list[str]:
    """Names of the trainer's own parameters, behind subclasses that pass everything on."""
    signatures = (inspect.signature(base.__init__).parameters for base in kind.__mro__)  # type: ignore[misc]
    return next(list(one)[1:] for one in signatures if "reward_funcs" in one)


def check_prompts(given: Mapping[str, Any]) -> None:
    """Refuse data sets without the column that TRL reads prompts from.

    Args:
        given: What the trainer was given, by parameter.

    Raises:
        MissingColumnError: Naming the columns there are.
    """
    for name in ("train_dataset", "eval_dataset"):
        data = given.get(name)
        for one in data.values() if isinstance(data, Mapping) else (data,):
            columns = getattr(one, "column_names", None)  # a stream may not know
            if columns is not None:
                check_prompt(name, columns)


def too_few_prompts(trainer: Any) -> str:
    """What to say where the training data are too few for a single batch, or none at all."""
    count = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else "too few"
    needed = trainer.args.generation_batch_size // trainer.num_generations
    return (
        f"train_dataset has {count} prompts, and a generation batch takes {needed} (per_device_train_batch_size × ranks × "
        "steps_per_generation / num_generations): not one step would be taken. Give more prompts, or a smaller batch."
    )


class SetupMixin(SamplingMixin):
    """Settles the objective with the configuration, and refuses what would be ignored or cannot be had."""

    def _settle(self, chosen: ObjectiveLike, config: Any, given: dict[str, Any]) -> None:
        expected, tail = GRPOConfig, ""
        self._keeps_reference = rloo = isinstance(self, RLOOTrainer)
        if rloo:
            expected, tail = RLOOConfig, " ObjectiveConfig goes with ObjectiveGRPOTrainer, also for rloo."
        if not isinstance(config, expected):
            raise CapabilityError(
                f"args is a {type(config).__name__}; {type(self).__name__} reads a {expected.__name__}.{tail}"
            )
        self._makes_prompts = given.get("environment_factory") is not None
        if not self._makes_prompts:
            check_prompts(given)
        defaults = stock_defaults(config)
        asked = as_objective(chosen, config)
        objective, found = carry_over(asked, config, usual_beta=defaults["beta"])
        if rloo and asked.kl is None and objective.kl is not None:
            warnings.warn(
                f"beta = {config.beta} becomes the objective's {objective.kl}, in the loss; RLOOTrainer alone subtracts the "
                "divergence from the reward. Give the objective a kl, or set beta=0.0 for none.",
                stacklevel=4,
            )
        self.dynamic_sampling, self.max_resamples = settle_sampling(type(self), config)
        self.max_empty_rollouts = settled(type(self), config, "max_empty_rollouts", 10)
        check_positive_int("max_empty_rollouts", self.max_empty_rollouts)
        self.self_test = settle_self_test(type(self), config)
        functions = given.get("reward_funcs")
        count = len(functions) if isinstance(functions, (list, tuple)) else int(functions is not None)
        own_sampler = given.get("rollout_func") is not None
        # RLOOTrainer keeps those of a sampler to itself.
        has_sampler = (config.use_vllm or own_sampler) and not rloo
        facts = trainer_facts(
            config,
            num_rewards=None if given.get("environment_factory") is not None else count,
            has_sampler=has_sampler,
            has_teacher=own_sampler,
        )
        found += [*option_violations(config, objective), *objective.mismatches(facts)]
        found += violations(
            objective,
            config,
            liger_loss=hasattr(type(self), "compute_liger_loss"),
            entropy_gradient="entropy_coef" in defaults or rloo,
            has_sampler=has_sampler,
            dynamic_sampling=self.dynamic_sampling,
            defaults=defaults,
        )
        check(objective.name, objective.capabilities, facts, found)
        self.objective = objective
        others = ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged")
        self._generates = not (own_sampler or any(getattr(config, other, False) for other in others))
        if objective.capabilities.requires_sampled_distribution and has_sampler:
            cuts = (facts.truncation(), altered_sampling(config), objective.correction and "a correction")
            self._sampler_must_say = ", ".join(one for one in cuts if one)

    def _finish_setup(self) -> None:
        # Older releases of the Trainer decide on this attribute whether to divide by the accumulation.
        if getattr(self, "compute_loss_func", None) is None:
            self.compute_loss_func = "the window has already divided"
        if self.objective.entropy_coef:
            self._entropy_bonus_enabled = (
                True  # TRL 1.8 to 1.13 computes entropies without gradient otherwise
            )
        self._scale = GradientScale.for_ddp(self.accelerator.num_processes)
        self.objective = with_environment_weights(self.objective, self.args, len(self.reward_func_names))
        weights = self.objective.estimator.reward_weights(unique_names(self.reward_func_names))
        if weights is not None:
            self.reward_weights = torch.tensor(weights, dtype=torch.float32)
        fault = Fault()
        with fault.guard():
            self._check_model()
        check_agreement(run_options(self), fault=fault)

    def _check_model(self) -> None:
        dropout = largest_dropout(self.model)
        found: list[str] = []
        needs = self.objective.capabilities
        inherited = inherited_sampling(
            getattr(self.model, "generation_config", None), self.args, none_is_open=_NONE_IS_OPEN
        )
        if inherited and self._generates and needs.requires_sampled_distribution:
            found.append(
                f"the model's own generation_config says {inherited}, which generate takes up: samples come from another "
                "distribution than the log-probabilities are taken from. Set that to None in model.generation_config."
            )
        check(self.objective.name, needs, TrainerFacts(dropout=dropout), found)
        if dropout:
            warnings.warn(
                f"dropout = {dropout} is active: log-probabilities recomputed for ratios differ from those of the "
                "training pass by chance. Set disable_dropout=True, and the dropout rates of the model's config to 0.",
                stacklevel=4,
            )
        if noise := getattr(self.args, "neftune_noise_alpha", None):
            warnings.warn(
                f"neftune_noise_alpha = {noise}: log-probabilities recomputed for ratios differ from those of the "
                "training pass by chance.",
                stacklevel=4,
            )
        if self.num_generations_eval < self.objective.capabilities.min_group_size and self.args.do_eval:
            warnings.warn(
                f"num_generations_eval is {self.num_generations_eval}, below the objective's smallest group "
                f"({self.objective.capabilities.min_group_size}): the evaluation loss is 0; rewards are still logged.",
                stacklevel=4,
            )
