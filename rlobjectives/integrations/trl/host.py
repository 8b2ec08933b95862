"""What the adapter relies on in TRL's trainers: the methods it overrides or calls, and their parameters.

`Host` is the base of the mixin for the type checker only. `CONTRACT` is the same knowledge for the tests: they
compare it with the installed TRL, so that a release that renames something fails there and not in a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

__all__ = ["CONTRACT", "Host"]

CONTRACT: dict[str, tuple[str, ...]] = {
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "train": ("resume_from_checkpoint",),
    "evaluate": ("eval_dataset",),
    "evaluation_loop": (
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ),
    "log": ("logs", "start_time"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_compute_loss": ("model", "inputs"),
    "_prepare_inputs": ("generation_batch",),
    "_generate": ("prompts",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ),
    "_save_checkpoint": ("model", "trial"),
    "_load_rng_state": ("checkpoint",),
    "_get_output_dir": ("trial",),
    "_get_train_sampler": ("dataset",),
}
"""Leading parameters (after ``self``) of every method the adapter overrides or calls."""

if TYPE_CHECKING:

    class Host:
        """The part of `trl.GRPOTrainer` (and `RLOOTrainer`) that the mixin sees."""

        accelerator: Any
        args: Any
        state: Any
        model: Any
        optimizer: Any
        lr_scheduler: Any
        processing_class: Any
        compute_loss_func: Any
        reward_func_names: list[str]
        reward_weights: Tensor
        num_generations: int
        num_generations_eval: int
        train_dataset: Any
        aux_loss_enabled: bool
        router_aux_loss_coef: float
        current_gradient_accumulation_steps: int
        _step: int
        _current_train_step_time: float
        _train_batch_size: int
        _buffered_inputs: Any
        _metrics: dict[str, dict[str, list[Any]]]
        _logs: dict[str, deque[Any]]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def get_batch_samples(  # noqa: D102
            self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
        ) -> tuple[list[Any], Any]: ...
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor: ...  # noqa: D102
        def _prepare_inputs(self, generation_batch: Any) -> Any: ...
        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor: ...
        def _generate(self, prompts: Any) -> tuple[Any, ...]: ...
        def _calculate_rewards(
            self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
        ) -> Tensor: ...
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]: ...
        def _get_per_token_logps_and_entropies(self, model: nn.Module, **kwargs: Any) -> tuple[Any, ...]: ...
        def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...  # noqa: D102
        def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102
        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None: ...
        def _load_rng_state(self, checkpoint: str | None) -> None: ...
        def _get_output_dir(self, trial: Any) -> str: ...
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any: ...
        def add_callback(self, callback: Any) -> None: ...  # noqa: D102

else:
    Host = object
