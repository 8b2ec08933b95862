"""`ObjectiveMixin`: any objective in TRL's GRPOTrainer, exact over the optimizer step."""

from __future__ import annotations

import inspect
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trl import RLOOTrainer

from rlobjectives.capabilities import TrainerFacts, check
from rlobjectives.distributed import GradientScale
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators import reward_metrics
from rlobjectives.integrations.trl.columns import (
    GENERATED_AT,
    GROUP,
    KEPT,
    SAMPLED,
    forward,
    token_layout,
)
from rlobjectives.integrations.trl.facts import is_stale, trainer_facts, violations
from rlobjectives.integrations.trl.host import Host
from rlobjectives.integrations.trl.options import option_violations, stock_defaults
from rlobjectives.integrations.trl.probe import missing_columns
from rlobjectives.integrations.trl.reports import average
from rlobjectives.integrations.trl.rollout import (
    Scored,
    global_rollouts,
    merge_rounds,
    score,
    unique_names,
)
from rlobjectives.integrations.trl.settle import ObjectiveLike, as_objective, carry_over
from rlobjectives.integrations.trl.skip import StepSkipper, forget_unscaled
from rlobjectives.integrations.trl.step_window import StepWindow, largest_dropout, open_window
from rlobjectives.objective import Objective
from rlobjectives.statistics import Mean, Stat, Sum, fold

__all__ = ["ObjectiveMixin"]


class ObjectiveMixin(Host):
    """Put it before `GRPOTrainer` (or `RLOOTrainer`) among the bases and say the objective; all else stays.

    The window is one optimizer step: all micro-batches of the accumulation, on all ranks, whatever
    ``steps_per_generation`` and ``num_iterations`` are. A window in which no token counts changes nothing: no
    backward, no optimizer step, no weight decay, no scheduler step, on any rank.

    Args:
        objective: An `Objective`, a name, a mapping, an estimator, or a function ``(Rollouts) -> advantages``. It
            may also stand in the class body or in `ObjectiveConfig`; one place, not two.
        args, kwargs: As for the TRL trainer.

    Attributes:
        objective: The objective in use, options carried over from TRL included.
        dynamic_sampling: ``"off"``, ``"drop"`` or ``"resample"`` groups without signal (see `ObjectiveConfig`).
        max_resamples: Bound on the extra generation rounds.

    Raises:
        CapabilityError: At construction, before any model is loaded, listing every option that would be ignored and
            everything the objective needs and TRL does not have.

    Example:
        >>> from trl import GRPOTrainer
        >>> class Trainer(ObjectiveMixin, GRPOTrainer):
        ...     objective = "gdpo"
    """

    objective: ObjectiveLike | None = None
    dynamic_sampling: str = "off"
    max_resamples: int = 2
    loss_is_scaled_for_ga: ClassVar[bool] = True  # the window already divided; the Trainer must not

    def __init__(self, *args: Any, objective: ObjectiveLike | None = None, **kwargs: Any) -> None:
        names = list(inspect.signature(super().__init__).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        config = given.get("args")
        self._reports: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._window_batches: list[Any] = []
        self._step_window: StepWindow | None = None
        self._skipper = StepSkipper()
        self._generation = 0
        self._sampling_stats: dict[str, list[Stat]] = {}
        self._kinds: dict[str, type[Stat]] = {}
        chosen = _one_of(objective, type(self).objective, config)
        if config is not None:
            self._settle(chosen, config, given)
        super().__init__(*args, **kwargs)
        if config is None:
            self._settle(chosen, self.args, given)
        self._finish_setup()

    # Set-up

    @property
    def _has_reference(self) -> bool:
        """Whether the trainer hands out reference log-probabilities; RLOOTrainer keeps them to itself."""
        return not isinstance(self, RLOOTrainer)

    def _settle(self, chosen: ObjectiveLike, config: Any, given: dict[str, Any]) -> None:
        objective, found = carry_over(as_objective(chosen, config), config, has_reference=self._has_reference)
        functions = given.get("reward_funcs")
        count = len(functions) if isinstance(functions, (list, tuple)) else int(functions is not None)
        facts = trainer_facts(
            config,
            num_rewards=None if given.get("environment_factory") is not None else count,
            has_rollout_func=given.get("rollout_func") is not None,
            has_reference=self._has_reference,
        )
        own = [sentence for part in objective.parts().values() for sentence in part.violations(facts)]
        found += [*option_violations(config), *own]
        found += violations(
            objective,
            config,
            token_level=objective.estimator.token_level,
            liger_loss=hasattr(type(self), "compute_liger_loss"),
            entropy_gradient="entropy_coef" in stock_defaults(config) or not self._has_reference,
        )
        check(objective.name, objective.capabilities, facts, found)
        self.objective: Objective = objective
        self.dynamic_sampling = getattr(config, "dynamic_sampling", self.dynamic_sampling)
        self.max_resamples = getattr(config, "max_resamples", self.max_resamples)

    def _finish_setup(self) -> None:
        # Older releases of the Trainer decide on this attribute whether to divide by the accumulation.
        if getattr(self, "compute_loss_func", None) is None:
            self.compute_loss_func = "the window has already divided"
        if self.objective.entropy_coef:
            self._entropy_bonus_enabled = (
                True  # TRL 1.8 to 1.13 computes entropies without gradient otherwise
            )
        self._scale = GradientScale.for_ddp(self.accelerator.num_processes)
        weights = getattr(self.objective.estimator, "weights", None)
        if isinstance(weights, dict):
            weights = self.objective.estimator.column_weights(tuple(self.reward_func_names))  # type: ignore[attr-defined]
        if weights is not None:
            self.reward_weights = torch.tensor(weights, dtype=torch.float32)
        dropout = largest_dropout(self.model)
        missing = missing_columns(self.objective, unique_names(self.reward_func_names), self.num_generations)
        check(self.objective.name, self.objective.capabilities, TrainerFacts(dropout=dropout), missing)
        if dropout:
            warnings.warn(
                f"dropout = {dropout} is active: log-probabilities recomputed for ratios differ from those of the "
                "training pass by chance. Set disable_dropout=True, and the dropout rates of the model's config to 0.",
                stacklevel=3,
            )
        if self.num_generations_eval < self.objective.capabilities.min_group_size and self.args.do_eval:
            warnings.warn(
                f"num_generations_eval is {self.num_generations_eval}, below the objective's smallest group "
                f"({self.objective.capabilities.min_group_size}): the evaluation loss is 0; rewards are still logged.",
                stacklevel=3,
            )

    # The window: collected before the Trainer's loop over micro-batches, opened at the first of them

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """The step's raw batches; remembered, because the window needs them all at once."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window_batches = list(batches)
        self._step_window = None
        return batches, count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; the first opens the window, and an empty window does nothing."""
        if self._step_window is None or not self._step_window.waiting:
            self._skipper.disarm()
            self._step_window = self._open(self._window_batches or [inputs])
            self._window_batches = []
        if not self._step_window.window.empty:
            return super().training_step(model, inputs, num_items_in_batch)
        self._step_window.next()
        self._step += 1
        if not self._step_window.waiting:
            self._skip_step()
        return torch.zeros((), device=self.args.device)

    def _open(self, batches: list[Any]) -> StepWindow:
        # Here and not in get_batch_samples: the Trainer restores the random state of a resumed run in between.
        self.model.train()
        first = self._step
        prepared = []
        for position, batch in enumerate(batches):
            self._step = first + position
            prepared.append(super()._prepare_inputs(batch))
        self._step = first
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        split = bool(rows % self.num_generations)
        return open_window(self, self.objective, prepared, split_groups=split)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """In training, the micro-batch that the window has already prepared."""
        if self.model.training and self._step_window is not None and self._step_window.waiting:
            return self._step_window.next().inputs
        return super()._prepare_inputs(generation_batch)

    def _skip_step(self) -> None:
        self._skipper.arm(self.optimizer, self.lr_scheduler)
        forget_unscaled(getattr(self.accelerator, "scaler", None), getattr(self.optimizer, "optimizer", None))
        tokens = {"window/tokens": 0.0, "window/skipped": 1.0}
        self._reports["train"].append(tokens)

    # Rewards to estimates

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Keep the matrix that TRL is about to sum up."""
        self._rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generation batch with our estimate in place of its advantages."""
        mode = "train" if self.model.training else "eval"
        output, scored = self._sample(inputs, mode)
        rounds = 0
        if mode == "train" and self.dynamic_sampling != "off":
            assert scored.alive is not None
            alive = scored.alive
            while (
                self.dynamic_sampling == "resample" and rounds < self.max_resamples and not bool(alive.all())
            ):
                rounds += 1
                again, rescored = self._sample(inputs, mode)
                assert rescored.alive is not None
                taken = rescored.alive & ~alive
                output = merge_rounds(output, again, self._local(taken), self.processing_class.pad_token_id)
                alive = alive | taken
            self._count_sampling(scored.alive, alive, rounds)
            output[KEPT] = self._local(alive)
        if mode == "train":
            self._generation += 1
        return output

    def _sample(self, inputs: Any, mode: str) -> tuple[dict[str, Any], Scored]:
        output = super()._generate_and_score_completions(inputs)
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        self._rows, self._group_size = output["completion_mask"].shape[0], group_size
        layout = token_layout(output)
        self._keep_logprobs(output, mode)
        rollouts = global_rollouts(
            self._rewards,
            self.reward_func_names,
            group_size,
            layout,
            self.accelerator,
            columns=self._estimator_columns(output),
        )
        local = slice(
            self._rows * self.accelerator.process_index, self._rows * (self.accelerator.process_index + 1)
        )
        if group_size < self.objective.capabilities.min_group_size:  # evaluation only; said at set-up
            output["advantages"] = None
            return output, Scored(rollouts, rollouts.rewards[:, 0], None)
        scored = score(rollouts, self.objective.estimator)
        estimate = scored.estimate[local]
        output["advantages"] = (
            estimate[:, : layout.shape[1]] if self.objective.estimator.token_level else estimate
        )
        output[GROUP] = rollouts.group_ids[local] + self._generation * rollouts.groups.count
        output[GENERATED_AT] = torch.tensor(self.state.global_step)
        self._report_rewards(scored, mode)
        return output, scored

    def _keep_logprobs(self, output: dict[str, Any], mode: str) -> None:
        """Log-probabilities under the weights that sampled, where TRL leaves them out and something reads them."""
        needs, stale = self.objective.capabilities, is_stale(self.args) and mode == "train"
        behavior = needs.needs_behavior_logprobs and output.get("sampling_per_token_logps") is None
        # The pre-pass takes them if it needs nothing else of the forward.
        prepass = mode == "train" and needs.needs_prepass and "entropy" not in self.objective.columns()
        estimator = self.objective.estimator.required()
        shaped = estimator.needs_ref_logprobs or estimator.needs_behavior_logprobs
        if output.get("old_per_token_logps") is None and (stale or behavior or prepass or shaped):
            size = self.args.per_device_train_batch_size if mode == "train" else None
            with torch.no_grad():
                logprobs, _, _ = forward(self, self.model, output, entropy=False, batch_size=size)
            output["old_per_token_logps" if stale else SAMPLED] = logprobs

    def _estimator_columns(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Token columns that the estimator itself says it reads."""
        needs = self.objective.estimator.required()
        if not (needs.needs_ref_logprobs or needs.needs_behavior_logprobs):
            return {}
        old = output.get("old_per_token_logps", output.get(SAMPLED))
        sampler = output.get("sampling_per_token_logps")
        columns = {"old_logprobs": old}
        if needs.needs_ref_logprobs:
            columns["ref_logprobs"] = output.get("ref_per_token_logps")
        if needs.needs_behavior_logprobs:
            columns["behavior_logprobs"] = old if sampler is None else sampler
        return {name: column for name, column in columns.items() if column is not None}

    def _local(self, per_group: Tensor) -> Tensor:
        """This rank's sequences of a fact about global groups."""
        start = self._rows * self.accelerator.process_index
        rows = torch.arange(start, start + self._rows, device=per_group.device)
        return per_group[rows // self._group_size]

    # The loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Share of the window's loss of one micro-batch, scaled for the averaging over ranks."""
        mode = "train" if self.model.training else "eval"
        if mode == "eval":
            if inputs["advantages"] is None:
                return torch.zeros((), device=self.args.device)
            split = bool(inputs["completion_mask"].shape[0] % self.num_generations_eval)
            step = open_window(self, self.objective, [inputs], split_groups=split)
            step.next()
        else:
            assert self._step_window is not None
            step = self._step_window
        micro_batches = len(step.outputs) + 1 + len(step.waiting)
        aux_enabled = bool(getattr(self, "aux_loss_enabled", False))
        logprobs, entropy, aux = forward(self, model, inputs, entropy=True, aux_loss=aux_enabled)
        if (
            self.objective.entropy_coef
            and entropy is not None
            and mode == "train"
            and not entropy.requires_grad
        ):
            raise CapabilityError(
                "entropy_coef needs entropies with gradient, which this trainer does not compute. Use GRPOTrainer of "
                "TRL 1.8 or newer, or entropy_coef=0."
            )
        if entropy is not None and not self.objective.entropy_coef:
            entropy = entropy.detach()
        extra = self._take_sampling_stats(mode) if not step.waiting else None
        loss, report = step.loss(logprobs, entropy, extra)
        if report is not None:
            self._reports[mode].append({**report, "window/skipped": 0.0} if mode == "train" else report)
        loss = loss * self._scale.factor
        if aux is not None and aux_enabled:
            loss = loss + self.router_aux_loss_coef * aux / micro_batches
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux).mean().item())
        return loss

    # Metrics

    def _report_rewards(self, scored: Scored, mode: str) -> None:
        stats = reward_metrics(scored.rollouts, self.objective.estimator)
        dead = stats.get("reward/constant_group_fraction")
        old = self._metrics[mode].get("frac_reward_zero_std")
        if old:  # TRL's own judges the sum of raw rewards, or the batch; ours judges the groups' advantages
            old[-1] = float(dead.value) if isinstance(dead, Mean) else old[-1]
        self._add_stats(mode, stats)
        if self.args.log_completions:
            self._log_advantages(scored)

    def _log_advantages(self, scored: Scored) -> None:
        """Our estimate (before any whitening over the window) in the table of completions."""
        estimate, layout = scored.estimate, scored.rollouts.tokens("The table of completions")
        if self.objective.estimator.token_level:
            estimate = layout.segment_sum(estimate) / layout.token_counts().clamp_min(1.0)
        column = (estimate if estimate.dim() == 1 else estimate[:, 0]).tolist()
        logged = self._logs["advantages"]
        for _ in range(min(len(column), len(logged))):
            logged.pop()
        logged.extend(column)

    def _count_sampling(self, before: Tensor, after: Tensor, rounds: int) -> None:
        self._add_stats(
            "train",
            {
                "sampling/resampled_group_fraction": Mean.of((after & ~before).double()),
                "sampling/dropped_group_fraction": Mean.of((~after).double()),
                "sampling/extra_rounds": Sum.of(torch.tensor(float(rounds))),
            },
        )

    def _add_stats(self, mode: str, stats: dict[str, Stat]) -> None:
        # Every rank sees the global batch, so one rank's word is enough.
        for name, stat in stats.items():
            mine = stat if self.accelerator.process_index == 0 else type(stat).identity(stat.row.device)
            self._sampling_stats.setdefault(f"{mode}:{name}", []).append(mine)
            self._kinds[name] = type(stat)

    def _take_sampling_stats(self, mode: str) -> dict[str, Stat]:
        mine = {key: value for key, value in self._sampling_stats.items() if key.startswith(f"{mode}:")}
        for key in mine:
            del self._sampling_stats[key]
        return {key.split(":", 1)[1]: fold(type(stats[0]), stats) for key, stats in mine.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand the windows' metrics to TRL's log, each weighted by what it counted."""
        mode = "train" if self.model.training else "eval"
        kinds = {**self.objective.metric_kinds(), **self._kinds}
        for name, value in average(self._reports.pop(mode, []), kinds).items():
            self._metrics[mode][name] = [value]
        super().log(logs, start_time)

    # Checkpoints: a rollout that is not used up belongs to the state

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Store the rollout in use beside the checkpoint, so that a resumed run takes the same next step."""
        super()._save_checkpoint(model, trial)
        used_up = self._step % (self.args.steps_per_generation * self.args.num_iterations) == 0
        if self.args.save_only_model:
            return
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        os.makedirs(folder, exist_ok=True)
        state = {
            "step": self._step,
            "generation": self._generation,
            "rollout": None if used_up else self._buffered_inputs,
        }
        torch.save(state, self._rollout_file(folder))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state and, beside it, the rollout in use."""
        super()._load_rng_state(checkpoint)
        path = None if checkpoint is None else self._rollout_file(checkpoint)
        if path is not None and os.path.isfile(path):
            state = torch.load(path, map_location=self.args.device, weights_only=True)
            self._step, self._generation = state["step"], state["generation"]
            self._buffered_inputs = state["rollout"]

    def _rollout_file(self, folder: str) -> str:
        return os.path.join(folder, f"rollout_{self.args.process_index}.pt")


def _one_of(argument: ObjectiveLike | None, attribute: ObjectiveLike | None, config: Any) -> ObjectiveLike:
    """The objective, which must be said in exactly one place."""
    inside = None
    if getattr(config, "objective", None):
        inside = {"name": config.objective, **(config.objective_args or {})}
    places = {"objective=": argument, "the class body": attribute, "ObjectiveConfig": inside}
    said = {place: value for place, value in places.items() if value is not None}
    if len(said) != 1:
        raise CapabilityError(
            "no objective: pass objective=..., write it in the class body, or use ObjectiveConfig(objective=...)."
            if not said
            else f"the objective is said in {len(said)} places ({', '.join(said)}). Keep one."
        )
    return next(iter(said.values()))
