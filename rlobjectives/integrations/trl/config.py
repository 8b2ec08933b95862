"""`ObjectiveConfig`: the objective as options of the training script, for `TrlParser` and its YAML files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig

from rlobjectives.checks import check_choice
from rlobjectives.errors import CapabilityError

__all__ = ["SAMPLING_MODES", "ObjectiveConfig"]

SAMPLING_MODES = ("off", "drop", "resample")


@dataclass
class ObjectiveConfig(GRPOConfig):  # type: ignore[misc]
    """`GRPOConfig` with an objective, so that scripts built on `TrlParser` stay as they are.

    Everything else means what it means in TRL; ``docs/coming_from_trl.md`` has a line for each option.

    Args:
        objective: Name of the algorithm (``"gdpo"``, ``"p3o"`` …) or ``"package.module:Class"``.
        objective_args: Overrides by field: ``{"estimator": {"weights": [1.0, 0.5]}}``.
        dynamic_sampling: What happens to prompt groups without signal: ``"off"`` nothing, ``"drop"`` they leave the
            window's sums and counts, ``"resample"`` they are sampled again, at most `max_resamples` times, and then
            dropped.
        max_resamples: Bound on the extra generation rounds of a batch.

    Raises:
        CapabilityError: If an option is out of range.

    Example:
        >>> config = ObjectiveConfig(output_dir="runs", objective="gdpo", use_cpu=True, bf16=False)
        >>> config.objective, config.dynamic_sampling
        ('gdpo', 'off')
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *getattr(GRPOConfig, "_VALID_DICT_FIELDS", []),
        "objective_args",
    ]

    objective: str | None = field(
        default=None, metadata={"help": "Name of the objective, or 'package.module:Class'."}
    )
    objective_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Overrides by field of the objective, as JSON on the command line."},
    )
    dynamic_sampling: str = field(
        default="off", metadata={"help": "Prompt groups without signal: 'off', 'drop' or 'resample'."}
    )
    max_resamples: int = field(
        default=2, metadata={"help": "Most extra generation rounds of a batch under 'resample'."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dynamic_sampling", self.dynamic_sampling, SAMPLING_MODES)
        if self.max_resamples < 0:
            raise CapabilityError(f"max_resamples is {self.max_resamples}; expected 0 or more.")
        if self.objective_args and not self.objective:
            raise CapabilityError(
                "objective_args is given without objective. Name the objective it belongs to."
            )
