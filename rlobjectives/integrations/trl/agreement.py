"""Options of TRL whose place an objective takes, and that say nothing else than the objective does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlobjectives.estimators import GDPO
from rlobjectives.losses import CISPO, GSPO, SAPO, VESPO, ClippedSurrogate, GSPOToken, PolicyLoss
from rlobjectives.objective import Objective
from rlobjectives.reductions import FixedBudget, LossReduction, SequenceMean, SequenceSum, TokenMean

__all__ = ["AGREEING", "agrees"]

_Agreement = Callable[[Any, Objective, Any], bool]

_LOSSES: dict[str, tuple[tuple[type[PolicyLoss], ...], type[LossReduction]]] = {
    "grpo": ((ClippedSurrogate, GSPO, GSPOToken), SequenceMean),
    "dr_grpo": ((ClippedSurrogate,), FixedBudget),
    "dapo": ((ClippedSurrogate,), TokenMean),
    "luspo": ((GSPO,), SequenceSum),
    "cispo": ((CISPO,), TokenMean),
    "sapo": ((SAPO,), SequenceMean),
    "vespo": ((VESPO,), TokenMean),
}
"""Policy losses and reduction of each of TRL's ``loss_type``. ``bnpo`` divides by each micro-batch: nothing here does."""


def agrees(name: str, value: Any, objective: Objective, config: Any) -> bool:
    """Whether an option that the objective replaces says what the objective does anyway.

    Args:
        name: The option.
        value: Its value.
        objective: What the user asked for.
        config: The trainer's configuration.

    Example:
        >>> from types import SimpleNamespace
        >>> objective = Objective.named("dr_grpo", reduction={"max_tokens": 64})
        >>> config = SimpleNamespace(max_completion_length=64)
        >>> agrees("loss_type", "dr_grpo", objective, config), agrees("loss_type", "grpo", objective, config)
        (True, False)
    """
    return name in AGREEING and AGREEING[name](value, objective, config)


def _loss_type(value: Any, objective: Objective, config: Any) -> bool:
    if value not in _LOSSES:
        return False
    losses, reduction = _LOSSES[value]
    fits = type(objective.policy_loss) in losses and type(objective.reduction) is reduction
    budget = getattr(objective.reduction, "max_tokens", config.max_completion_length)
    return fits and bool(budget == config.max_completion_length)


def _level(value: Any, objective: Objective, config: Any) -> bool:
    return bool(value == "sequence") and isinstance(objective.policy_loss, (GSPO, GSPOToken))


def _scale(value: Any, objective: Objective, config: Any) -> bool:
    words = {True: "group", False: "none"}
    own = getattr(objective.estimator, "scale", None)
    return own is not None and bool(words.get(value, value) == own)


def _aggregation(value: Any, objective: Objective, config: Any) -> bool:
    return bool(value == "normalize_then_sum") and isinstance(objective.estimator, GDPO)


def _clip(*names: str) -> _Agreement:
    return lambda value, objective, config: all(
        getattr(objective.policy_loss, one, None) == value for one in names
    )


def _epsilon(value: Any, objective: Objective, config: Any) -> bool:
    # TRL's bound on both sides, unless the upper one is given too.
    both = ("clip_low",) if getattr(config, "epsilon_high", None) is not None else ("clip_low", "clip_high")
    return _clip(*both)(value, objective, config)


def _epsilon_high(value: Any, objective: Objective, config: Any) -> bool:
    return _clip("ratio_cap" if isinstance(objective.policy_loss, CISPO) else "clip_high")(
        value, objective, config
    )


AGREEING: dict[str, _Agreement] = {
    "loss_type": _loss_type,
    "importance_sampling_level": _level,
    "scale_rewards": _scale,
    "multi_objective_aggregation": _aggregation,
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
}
"""The options, each with its judgement of a value, an objective and a configuration."""
