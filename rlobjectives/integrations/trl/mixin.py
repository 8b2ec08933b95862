"""`ObjectiveMixin`: any objective in TRL's GRPOTrainer, exact over the optimizer step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlobjectives.distributed.ending import ends_together, watched
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.emptiness import refuse_emptiness
from rlobjectives.integrations.trl.checkpoint import Rollout, load_rollout, save_rollout
from rlobjectives.integrations.trl.checkpoint_folder import (
    check_output_folder,
    checkpoint_to_resume,
    written_whole,
)
from rlobjectives.integrations.trl.columns import forward
from rlobjectives.integrations.trl.epochs import ResumableSampler
from rlobjectives.integrations.trl.objective_source import (
    ObjectiveLike,
    check_reference,
    one_of,
    with_reference,
)
from rlobjectives.integrations.trl.setup import SetupMixin, check_bases, own_parameters, too_few_prompts
from rlobjectives.integrations.trl.skip import StepSkipper, forget_unscaled
from rlobjectives.integrations.trl.step_window import StepWindow, open_window
from rlobjectives.window import merge_reports

__all__ = ["ObjectiveMixin"]


class ObjectiveMixin(SetupMixin):
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
        dynamic_sampling: ``"off"``, ``"drop"`` or ``"resample"`` groups without signal: in the class body or in
            `ObjectiveConfig`, which says more; one place, not two.
        max_resamples: Bound on the extra generation rounds; the same.
        max_empty_rollouts: Generation batches in a row without any counted token, after which the run stops with an
            error instead of ending as if it had trained; the same. By default 10.
        self_test: Whether the model is tested before the first step; the same.

    Raises:
        CapabilityError: In the class statement, if a trainer stands before the mixin. At construction, listing every
            option that would be ignored and everything the objective needs and TRL does not have; what the
            configuration alone tells, before any model is loaded.

    Example:
        >>> from trl import GRPOTrainer
        >>> class Trainer(ObjectiveMixin, GRPOTrainer):
        ...     objective = "gdpo"
    """

    loss_is_scaled_for_ga: ClassVar[bool] = True  # the window already divided; the Trainer must not

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse bases of which something would not be used: the objective, or somebody's own loss.

        Raises:
            CapabilityError: If a trainer stands before the mixin, or one behind it has a loss of its own.
        """
        super().__init_subclass__(**kwargs)
        check_bases(cls, ObjectiveMixin)

    def __init__(self, *args: Any, objective: ObjectiveLike | None = None, **kwargs: Any) -> None:
        given = {**dict(zip(own_parameters(type(self)), args, strict=False)), **kwargs}
        config = given.get("args")
        self._reports: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        self._window_batches: list[Any] = []
        self._step_window: StepWindow | None = None
        self._before: tuple[int, Rollout] | None = None
        self._skipper = StepSkipper()
        self._begin_sampling()
        chosen = one_of(objective, type(self).objective, config)
        if config is not None:
            self._settle(chosen, config, given)
            check_output_folder(config)
            own = with_reference(self.objective, config)
            args = tuple(own if one is config else one for one in args)
            kwargs = {name: own if one is config else one for name, one in kwargs.items()}
        super().__init__(*args, **kwargs)
        if config is None:
            self._settle(chosen, self.args, given)
            check_reference(self.objective, self.args)
        self._finish_setup()

    # An exception on one rank ends all of them

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does; an exception on one rank ends all of them."""
        with ends_together():
            return super().evaluate(*args, **kwargs)

    # The window: collected before the Trainer's loop over micro-batches, opened at the first of them

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's order of the prompts, which goes on where a resumed run does."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        return None if sampler is None else ResumableSampler(sampler, lambda: int(self.state.epoch or 0.0))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """The step's raw batches; remembered, because the window needs them all at once.

        Raises:
            CapabilityError: If a new run finds not even one.
        """
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and not self.state.global_step:
            raise CapabilityError(too_few_prompts(self))
        self._window_batches = list(batches)
        self._step_window = self._before = None
        return batches, count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; the first opens the window, and an empty window does nothing."""
        if self._step_window is None or not self._step_window.waiting:
            self._test_model()
            began = time.perf_counter()
            self._skipper.disarm()
            self._step_window = self._open(self._window_batches or [inputs])
            self._window_batches = []
            self._current_train_step_time += time.perf_counter() - began  # TRL times its own part itself
        if not self._step_window.window.empty:
            self._empty_generations.clear()
            done = len(self._step_window.outputs)
            loss = super().training_step(model, inputs, num_items_in_batch)
            if len(self._step_window.outputs) == done:
                raise CapabilityError(
                    f"the loss of {type(self).__name__} did not ask the objective. Call super()._compute_loss(...) where "
                    "it overrides that, and add to what it returns."
                )
            return loss
        self._step_window.next()
        self._step += 1
        if not self._step_window.waiting:
            self._skip_step()
        return torch.zeros((), device=self.args.device)

    def _open(self, batches: list[Any]) -> StepWindow:
        # Here and not in get_batch_samples: the Trainer restores the random state of a resumed run in between.
        self.model.train()
        first = self._step
        self._before = self.state.global_step, self._rollout_in_use()
        prepared = []
        for position, batch in enumerate(batches):
            self._step = first + position
            prepared.append(super()._prepare_inputs(batch))
        self._step = first
        # Of the data loader: transformers 4 resumes with the checkpoint's batch size.
        rows = self._train_batch_size * self.args.steps_per_generation
        split = bool(rows % self.num_generations)
        return open_window(self, self.objective, prepared, split_groups=split)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """In training, the micro-batch that the window has already prepared."""
        if self.model.training and self._step_window is not None and self._step_window.waiting:
            return self._step_window.next().inputs
        return super()._prepare_inputs(generation_batch)

    def _skip_step(self) -> None:
        self._empty_generations.add(self._generation)
        refuse_emptiness(
            len(self._empty_generations) - 1,
            self.max_empty_rollouts,
            "the run would end as if it had trained",
        )
        self._skipper.arm(self.optimizer, self.lr_scheduler)
        forget_unscaled(getattr(self.accelerator, "scaler", None), getattr(self.optimizer, "optimizer", None))
        tokens = {"window/tokens": 0.0, "window/skipped": 1.0}
        self._reports["train"].append(tokens)
        self._metrics["train"]["step_time"].append(self._current_train_step_time)
        self._current_train_step_time = 0.0

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
            if mode == "train":
                report["window/skipped"] = 0.0
            self._reports[mode].append(report)
        loss = loss * self._scale.factor
        if aux is not None and aux_enabled:
            loss = loss + self.router_aux_loss_coef * aux / micro_batches
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather(aux.detach()).mean().item())
        return loss

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluation, with a loss in which every sequence of the data set counts once.

        The Trainer's own average gives a short last batch the weight of a full one, or, where accelerate filled it up
        from the beginning, cuts it by the number of *prompts*.
        """
        self._reports.pop("eval", None)
        self._evaluation_rows = _rows(dataloader, self.num_generations_eval, self.args.dataloader_drop_last)
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        self._evaluation_rows = None
        found = merge_reports(self._reports.get("eval", []), self.objective.metric_kinds(), one_set=True)
        for name in output.metrics:
            if name.endswith("_loss") and "loss/total" in found:
                output.metrics[name] = found["loss/total"]
        return output

    # Metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand the windows' metrics to TRL's log, each weighted by what it counted."""
        mode = "train" if self.model.training else "eval"
        kinds = {**self.objective.metric_kinds(), **self._kinds}
        reports = self._reports.pop(mode, [])
        for name, value in merge_reports(reports, kinds, one_set=mode == "eval").items():
            self._metrics[mode][name] = [value]
        super().log(logs, start_time)

    # Checkpoints: a rollout that is not used up belongs to the state

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Store the rollout in use with the checkpoint, so that a resumed run takes the same next step.

        Ours is written first and a marker last, so that a run killed in between leaves nothing that passes for a
        checkpoint.

        Raises:
            CheckpointError: On all ranks, if one cannot write. Older checkpoints are untouched.
        """
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        with written_whole(self, folder):
            if not self.args.save_only_model:
                opened_at, rollout = self._before or (-1, self._rollout_in_use())
                # The same step as then: its losses are there, but the optimizer's step is not (`enable_jit_checkpoint`).
                if opened_at != self.state.global_step:
                    rollout = self._rollout_in_use()
                save_rollout(self, str(folder), rollout)
            super()._save_checkpoint(model, trial)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's training, from a checkpoint that was verified; an exception on one rank ends all of them within seconds.

        Args:
            resume_from_checkpoint: A checkpoint; or True for the last whole one, with a warning that names those that are
                not.
            *args: As for the TRL trainer.
            **kwargs: The same.

        Raises:
            CheckpointError: On all ranks, if the checkpoint is half, damaged or empty, with the one to take instead.
            RankError: If another rank failed, with its words.
        """
        with watched(new_run=True), ends_together():
            chosen = checkpoint_to_resume(self, resume_from_checkpoint)
            return super().train(chosen, *args, **kwargs)

    def _rollout_in_use(self) -> Rollout:
        used_up = self._step % (self.args.steps_per_generation * self.args.num_iterations) == 0
        return Rollout(self._step, self._generation, None if used_up else self._buffered_inputs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state and, beside it, the rollout in use."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_rollout(self, checkpoint)


def _rows(dataloader: Any, num_generations: int, drop_last: bool) -> int | None:
    """Sequences of an evaluation; None where the data set does not know, or nothing is filled up."""
    try:
        return None if drop_last else len(dataloader.dataset) * num_generations
    except (AttributeError, TypeError):  # a stream has no length
        return None
