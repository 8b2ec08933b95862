"""What each reward weighs: in column order or by name, for every estimator that adds rewards up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.checks import check_number, check_numbers
from rlobjectives.component import Component
from rlobjectives.errors import CapabilityError
from rlobjectives.maths.reward_sum import RewardSum, combined_reward
from rlobjectives.rollouts import Rollouts

if TYPE_CHECKING:
    from rlobjectives.estimators.base import Estimator

    _Base = Estimator
else:
    _Base = object  # a second way from `Estimator` to a part would make its short name ambiguous in configurations

__all__ = ["RewardWeights"]


@dataclass(frozen=True, kw_only=True)
class RewardWeights(_Base):
    """What an estimator whose rewards are weighed has beside its base: the one place that knows how weights are given.

    Args:
        weights: One weight per reward, in the order of ``reward_names`` or by name; None weighs all 1.

    Raises:
        CapabilityError: If a weight is no finite number.

    Example:
        >>> from rlobjectives import GRPO
        >>> GRPO(weights={"format": 0.5, "correct": 1.0}).reward_weights(("correct", "format"))
        (1.0, 0.5)
    """

    lowest_weight: ClassVar[float] = -math.inf

    weights: tuple[float, ...] | dict[str, float] | None = None

    def check(self) -> None:
        """Weights are numbers, and in column order a tuple."""
        super().check()
        if isinstance(self.weights, Mapping):
            for name, weight in self.weights.items():
                if not isinstance(name, str):
                    raise CapabilityError(f"weights has the key {name!r}; expected the name of a reward.")
                check_number(f"weights[{name!r}]", weight, low=self.lowest_weight)
            object.__setattr__(self, "weights", dict(self.weights))
        elif self.weights is not None:
            check_numbers("weights", self.weights, low=self.lowest_weight)
            object.__setattr__(self, "weights", tuple(self.weights))

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """Weights that do not match the rewards."""
        yield from super().conflicts(parts, facts)
        if self.weights is None:
            return
        if facts.reward_names is not None:
            try:
                self.reward_weights(facts.reward_names)
            except CapabilityError as error:
                yield str(error)
        elif facts.num_rewards is not None and len(self.weights) != facts.num_rewards:
            yield (
                f"{type(self).__name__} has {len(self.weights)} weights for {facts.num_rewards} rewards. "
                "Give one weight per reward."
            )

    def combined(self, rollouts: Rollouts) -> RewardSum:
        """The rewards of these rollouts, weighed and added up."""
        return combined_reward(rollouts, self.reward_weights(rollouts.reward_names or ()))
