"""From what the user wrote to an `Objective`: names, dictionaries, callables, and options carried over from TRL."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlobjectives.building import build
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators import Estimator
from rlobjectives.integrations.trl.config import as_sampling_mode, check_resamples
from rlobjectives.objective import Objective
from rlobjectives.reductions import LossReduction
from rlobjectives.rollouts import Rollouts
from rlobjectives.slots import Slot, call, missing_options
from rlobjectives.terms import KLPenalty

__all__ = [
    "ObjectiveLike",
    "as_objective",
    "carry_over",
    "check_reference",
    "one_of",
    "settle_sampling",
    "settled",
    "with_environment_weights",
    "with_reference",
]

ObjectiveLike = Objective | Estimator | str | Mapping[str, Any] | Callable[[Rollouts], Tensor]
"""An objective, an estimator, a name, ``{"name": …, field: options}``, or a function from rollouts to advantages."""


def as_objective(value: ObjectiveLike, config: Any = None) -> Objective:
    """Build the objective.

    Args:
        value: An `Objective`; an estimator or a plain function ``(Rollouts) -> advantages`` (both take the
            default loss and reduction); a registered name; or a mapping with ``name`` and overrides by field.
        config: The trainer's configuration: its ``max_completion_length`` is the budget of a reduction that needs
            one and was not given any.

    Raises:
        UnknownAlgorithmError: If a name is not known.
        CapabilityError: If an option does not fit.

    Example:
        >>> as_objective({"name": "gdpo", "estimator": {"weights": (1.0, 0.5)}}).name
        'gdpo'
        >>> as_objective(lambda rollouts: rollouts.rewards.sum(1)).name
        '<lambda>'
    """
    if isinstance(value, Objective):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return Objective(estimator=value)  # type: ignore[arg-type]  # Objective makes a part of it
    if "name" not in value and "estimator" not in value:
        raise CapabilityError(
            f"objective is {dict(value)!r}; a mapping needs 'name', the algorithm, beside overrides by field; or it is all "
            "fields of an objective, estimator among them."
        )
    fields = {name: option for name, option in value.items() if name != "name"}
    found = build(value["name"], fields) if "name" in value else fields
    return (
        found if isinstance(found, Objective) else call("objective", Objective, _with_budget(found, config))
    )


def carry_over(objective: Objective, config: Any, *, usual_beta: float = 0.0) -> tuple[Objective, list[str]]:
    """Fill what the objective leaves open from TRL's options: ``beta`` becomes a `KLPenalty`, ``reward_weights``
    the estimator's weights.

    Args:
        objective: What the user asked for.
        config: The trainer's configuration; its ``beta`` and ``reward_weights`` may be set.
        usual_beta: TRL's default, which contradicts no ``kl`` of the objective.

    Returns:
        The objective, and a sentence for each contradiction.
    """
    found: list[str] = []
    beta = getattr(config, "beta", 0.0)
    if beta and objective.estimator.reward_kl_coef:
        found.append(
            f"beta = {beta} would charge the divergence from the reference policy in the loss, and "
            f"{type(objective.estimator).__name__} charges it in the rewards already (kl_coef = "
            f"{objective.estimator.reward_kl_coef}). Keep one: leave beta at 0.0, or set the estimator's kl_coef to 0.0."
        )
    elif beta and objective.kl is None:
        ratio = bool(getattr(config, "use_bias_correction_kl", False))
        objective = dataclasses.replace(
            objective, kl=KLPenalty(coef=float(beta), estimator="ratio_k3" if ratio else "k3")
        )
    elif beta not in (0.0, usual_beta) and objective.kl is not None and float(beta) != _coef(objective):
        found.append(
            f"beta = {beta} contradicts the objective's kl ({objective.kl}). Leave beta out; the objective's kl is used."
        )
    weights = getattr(config, "reward_weights", None)
    if weights is not None:
        weights = tuple(float(weight) for weight in weights)
        own = getattr(objective.estimator, "weights", None)
        if own is None and hasattr(objective.estimator, "weights"):
            estimator = dataclasses.replace(objective.estimator, weights=weights)  # type: ignore[type-var]
            objective = dataclasses.replace(objective, estimator=estimator)
        elif not isinstance(own, tuple) or tuple(map(float, own)) != weights:
            found.append(
                f"reward_weights = {list(weights)} does not reach {type(objective.estimator).__name__} "
                f"({'it has no weights' if own is None else f'its weights are {own}'}). Leave reward_weights out and "
                "say the weights on the estimator."
            )
    return objective, found


def with_environment_weights(objective: Objective, config: Any, num_rewards: int) -> Objective:
    """The objective with a weight of 1 for each reward that comes from an environment, as TRL has it.

    ``reward_weights`` weighs the reward functions alone; how many rewards environments add is known once they are made.

    Args:
        objective: What `carry_over` made of the user's.
        config: The trainer's configuration.
        num_rewards: Reward functions and rewards of environments.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(reward_weights=[2.0])
        >>> objective, _ = carry_over(as_objective("grpo"), config)
        >>> with_environment_weights(objective, config, 2).estimator.weights
        (2.0, 1.0)
    """
    given = getattr(config, "reward_weights", None)
    if given is None or len(given) >= num_rewards:
        return objective
    weights = (*map(float, given), *[1.0] * (num_rewards - len(given)))
    estimator = dataclasses.replace(objective.estimator, weights=weights)  # type: ignore[type-var]
    return dataclasses.replace(objective, estimator=estimator)


def with_reference(objective: Objective, config: Any) -> Any:
    """The configuration under which TRL builds the reference model that the objective reads.

    TRL builds one where ``beta`` is not 0, so a term that reads reference log-probabilities sets it: in a copy, because
    the user's own may configure the next trainer, too. What TRL would do with the number, the objective does.

    Args:
        objective: What `carry_over` made of the user's.
        config: The trainer's configuration.

    Returns:
        `config` itself, or a shallow copy with another ``beta``: the coefficient of the objective's ``kl``, or 1 where
        that is 0 or the objective has none.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(beta=0.0)
        >>> with_reference(as_objective({"name": "grpo", "kl": {"coef": 0.1}}), config).beta, config.beta
        (0.1, 0.0)
    """
    if getattr(config, "beta", 0.0) or not objective.capabilities.needs_ref_logprobs:
        return config
    config = copy.copy(config)
    config.beta = _coef(objective) or 1.0
    return config


def check_reference(objective: Objective, config: Any) -> None:
    """Raise if the objective reads a reference model that TRL, given no ``args``, has not built.

    Raises:
        CapabilityError: Saying what to give.
    """
    if with_reference(objective, config) is not config:
        raise CapabilityError(
            f"{objective.name} reads a reference policy, and without args TRL builds none. Give "
            f"args={type(config).__name__}(...); its beta may stay 0."
        )


def one_of(argument: ObjectiveLike | None, attribute: ObjectiveLike | None, config: Any) -> ObjectiveLike:
    """The objective, which must be given exactly once.

    Args:
        argument: Given to the trainer.
        attribute: In the class body.
        config: An `ObjectiveConfig`, or another without one.

    Raises:
        CapabilityError: If it is given nowhere, or in several places.
    """
    inside = None
    if getattr(config, "objective", None):
        inside = {"name": config.objective, **(config.objective_args or {})}
    places = {"objective=": argument, "the class body": attribute, "ObjectiveConfig": inside}
    said = {place: value for place, value in places.items() if value is not None}
    if len(said) != 1:
        raise CapabilityError(
            "no objective: pass objective=..., write it in the class body, or use ObjectiveConfig(objective=...)."
            if not said
            else f"the objective is given in {len(said)} places ({', '.join(said)}). Keep one."
        )
    return next(iter(said.values()))


def settle_sampling(kind: type, config: Any) -> tuple[str, int]:
    """What happens to groups without signal, and the most extra rounds, from the class body or the configuration.

    Args:
        kind: The trainer's class.
        config: Its configuration.

    Raises:
        CapabilityError: If one is given in both places, or out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> settle_sampling(object, SimpleNamespace(dynamic_sampling="drop")), settle_sampling(object, None)
        (('drop', 2), ('off', 2))
    """
    mode = as_sampling_mode(settled(kind, config, "dynamic_sampling", "off"))
    rounds: int = settled(kind, config, "max_resamples", 2)
    check_resamples(rounds)
    return mode, rounds


def settle_self_test(kind: type, config: Any) -> bool:
    """Whether the model is tested before the first step, from the class body or the configuration; by default it is.

    Args:
        kind: The trainer's class.
        config: Its configuration.

    Raises:
        CapabilityError: If it is given in both places, or neither true nor false.

    Example:
        >>> from types import SimpleNamespace
        >>> settle_self_test(object, SimpleNamespace(self_test=False)), settle_self_test(object, None)
        (False, True)
    """
    found = settled(kind, config, "self_test", True)
    if not isinstance(found, bool):
        raise CapabilityError(f"self_test is {found!r}; expected True or False.")
    return found


def settled(kind: type, config: Any, name: str, usual: Any) -> Any:
    """An option from the class body or the configuration.

    Args:
        kind: The trainer's class.
        config: Its configuration.
        name: Of the option.
        usual: What it is if neither says it.

    Raises:
        CapabilityError: If it is given in both places.
    """
    here, there = getattr(kind, name, None), getattr(config, name, None)
    if here is not None and there is not None:
        raise CapabilityError(f"{name} is given in 2 places (the class body, ObjectiveConfig). Keep one.")
    return next((one for one in (here, there) if one is not None), usual)


def _coef(objective: Objective) -> float:
    return objective.kl.coef if isinstance(objective.kl, KLPenalty) else 0.0


def _with_budget(fields: dict[str, Any], config: Any) -> dict[str, Any]:
    given, length = fields.get("reduction"), getattr(config, "max_completion_length", None)
    given = {"class_path": given} if isinstance(given, str) else given
    if length is None or not isinstance(given, Mapping) or "class_path" not in given:
        return fields
    kind, options = (
        Slot.of(LossReduction).named(given["class_path"], "reduction"),
        given.get("init_args") or {},
    )
    if not callable(kind) or "max_tokens" not in missing_options(kind, options):
        return fields
    return {**fields, "reduction": {**given, "init_args": {**options, "max_tokens": length}}}
