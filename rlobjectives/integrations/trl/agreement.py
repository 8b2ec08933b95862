"""What all ranks must have been given alike: the objective, and nearly every option of the configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlobjectives.descriptions import described

if TYPE_CHECKING:
    from rlobjectives.integrations.trl.sampling import SamplingMixin

__all__ = ["MAY_DIFFER", "run_options"]

MAY_DIFFER = frozenset(
    {
        "disable_tqdm",
        "hub_model_id",
        "hub_private_repo",
        "hub_token",
        "local_rank",
        "log_level",
        "log_level_replica",
        "logging_dir",
        "output_dir",
        "project",
        "push_to_hub_token",
        "report_to",
        "run_name",
        "trackio_space_id",
        "vllm_group_port",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
    }
)
"""Options of a configuration that may have another value on each rank: where things are, and who is told."""


def run_options(trainer: SamplingMixin) -> dict[str, object]:
    """Everything that must be the same on all ranks, by name.

    Args:
        trainer: Constructed.
    """
    config: Any = trainer.args
    options: dict[str, object] = {
        one.name: _readable(getattr(config, one.name))
        for one in dataclasses.fields(config)
        if one.name not in MAY_DIFFER and hasattr(config, one.name)
    }
    options |= {f"objective: {name}": words for name, words in trainer.objective.descriptions().items()}
    for name in ("dynamic_sampling", "max_resamples", "max_empty_rollouts", "self_test"):
        options[name] = getattr(trainer, name)
    options["reward functions"] = tuple(trainer.reward_func_names)
    if hasattr(trainer.train_dataset, "__len__"):
        options["rows of train_dataset"] = len(trainer.train_dataset)
    return options


def _readable(option: object) -> str:
    """An option in words; of a file of options, what it says and not where it lies."""
    if isinstance(option, str) and option.endswith((".json", ".yaml", ".yml")) and Path(option).is_file():
        option = Path(option).read_text(encoding="utf-8")
    return described(option, objects=False)
