"""`ObjectiveConfig`: the objective as options of the training script, for `TrlParser` and its YAML files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig

from rlobjectives.checks import check_choice, check_positive_int
from rlobjectives.errors import CapabilityError

__all__ = ["SAMPLING_MODES", "ObjectiveConfig", "as_sampling_mode", "check_resamples"]

SAMPLING_MODES = ("off", "drop", "resample")


def as_sampling_mode(value: object) -> str:
    """One of `SAMPLING_MODES`; False is ``"off"``, because YAML reads ``off`` without quotes as that.

    Raises:
        CapabilityError: If it is none of them.

    Example:
        >>> as_sampling_mode(False), as_sampling_mode("drop")
        ('off', 'drop')
    """
    mode = "off" if value is False else value
    check_choice("dynamic_sampling", mode, SAMPLING_MODES)
    return str(mode)


def check_resamples(value: Any) -> None:
    """Raise unless it is a number of rounds."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CapabilityError(f"max_resamples is {value!r}; expected an integer, 0 or more.")


@dataclass
class ObjectiveConfig(GRPOConfig):  # type: ignore[misc]
    """`GRPOConfig` with an objective, so that scripts built on `TrlParser` stay as they are.

    Everything else means what it means in TRL; ``docs/coming_from_trl.md`` has a line for each option.

    Args:
        objective: Name of the algorithm (``"gdpo"``, ``"p3o"`` …) or ``"package.module:Class"``.
        objective_args: Overrides by field: ``{"estimator": {"weights": [1.0, 0.5]}}``.
        dynamic_sampling: What happens to prompt groups without signal: ``"off"`` nothing, ``"drop"`` they leave the
            window's sums and counts, ``"resample"`` they are sampled again, at most `max_resamples` times, and then
            dropped. None leaves it to the trainer's class, which by default says ``"off"``. A False is taken for
            ``"off"``: YAML reads the bare word so.
        max_resamples: Bound on the extra generation rounds of a batch. None leaves it to the trainer's class, which
            by default says 2.
        max_empty_rollouts: Generation batches in a row without any counted token, after which the run stops with an
            error, for it only seems to train. None leaves it to the trainer's class, which by default says 10.
        self_test: Before the first step, test whether padding or sampling changes the model's log-probabilities
            (`rlobjectives.integrations.transformers.check_model`), and refuse it if so. None leaves it to the trainer's
            class, which by default says True.

    Raises:
        CapabilityError: If an option is out of range.

    Example:
        >>> config = ObjectiveConfig(output_dir="runs", objective="gdpo", use_cpu=True, bf16=False, dynamic_sampling="drop")
        >>> config.objective, config.dynamic_sampling
        ('gdpo', 'drop')
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
    dynamic_sampling: str | None = field(
        default=None,
        metadata={"help": "Prompt groups without signal: 'off' (the default), 'drop' or 'resample'."},
    )
    max_resamples: int | None = field(
        default=None, metadata={"help": "Most extra generation rounds of a batch under 'resample' (2)."}
    )
    self_test: bool | None = field(
        default=None, metadata={"help": "Test the model's log-probabilities before the first step (true)."}
    )

    max_empty_rollouts: int | None = field(
        default=None,
        metadata={"help": "Generation batches in a row without a counted token that end the run (10)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic_sampling is not None:
            self.dynamic_sampling = as_sampling_mode(self.dynamic_sampling)
        if self.max_resamples is not None:
            check_resamples(self.max_resamples)
        if self.max_empty_rollouts is not None:
            check_positive_int("max_empty_rollouts", self.max_empty_rollouts)
        if self.objective_args and not self.objective:
            raise CapabilityError(
                "objective_args is given without objective. Name the objective it belongs to."
            )
