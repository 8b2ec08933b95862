"""A plain function as an estimator: rollouts in, advantages out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import shown
from rlobjectives.columns import Column, Read, read
from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.estimators.base import Estimator
from rlobjectives.rollouts import Rollouts

__all__ = ["FunctionEstimator"]


@dataclass(frozen=True, kw_only=True)
class FunctionEstimator(Estimator):
    """Wraps a function ``(Rollouts) -> advantages``; `Objective` does it for you.

    The function sees whole prompt groups, unscored answers and dummies included: `Rollouts.counted` says which count,
    and `Rollouts.group_mean` is over those. What needs the whole window (whitening) is not for a function: subclass
    `Estimator` and declare a statistic.

    Args:
        function: Gives one number per sequence ``[n]``, or one per token, shaped like the layout's mask.
        token_level: True when it gives one number per token; a bare function in `Objective` is taken to give one a
            sequence.
        reads: Columns of rollouts that the function cannot do without: the library's by name, or a `Column` of your own.
            A bare function may have them as an attribute ``reads``.

    Raises:
        CapabilityError: If it is not callable.

    Example:
        >>> from rlobjectives import Objective
        >>> def centred(rollouts):
        ...     total = rollouts.rewards.sum(1)
        ...     return torch.where(rollouts.counted, total - rollouts.group_mean(total), 0.0)
        >>> objective = Objective(estimator=centred)
        >>> objective.estimator.estimate(Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0])))
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    function: Callable[[Rollouts], Tensor]
    token_level: bool = False  # type: ignore[misc]  # an option here, a constant of every other estimator
    reads: tuple[str | Column | Read, ...] = ()  # type: ignore[misc]  # likewise

    def declared_reads(self) -> tuple[Read, ...]:
        """What was said of the function, here or by an attribute ``reads`` of its own."""
        return tuple(map(read, (*self.reads, *getattr(self.function, "reads", ()))))

    def check(self) -> None:
        """It can be called, and what it reads is listed."""
        if not callable(self.function):
            raise CapabilityError(
                f"function is {shown(self.function)}; expected a function (Rollouts) -> advantages."
            )
        if not isinstance(self.reads, (tuple, list)):
            raise CapabilityError(
                f"reads is {shown(self.reads)}; expected a tuple of columns, by name or as Column."
            )

    @property
    def compares_siblings(self) -> bool:
        """It may."""
        return True

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """What the function returns, float64 and without gradient.

        Raises:
            ShapeError: If it returns something else than a tensor of the right shape.
        """
        found = self.function(rollouts)
        expected = (
            rollouts.tokens("A token-level function").shape if self.token_level else (rollouts.num_sequences,)
        )
        if not isinstance(found, Tensor) or tuple(found.shape) != expected:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            name = getattr(self.function, "__name__", self.function)
            layout, hint = rollouts.layout, ""
            if layout is not None and not self.token_level and getattr(found, "shape", None) == layout.shape:
                hint = f" One number per token is FunctionEstimator(function={name}, token_level=True)."
            raise ShapeError(
                f"{name!s} returned {got}; expected a tensor "
                f"{list(expected)}, one number per {'token' if self.token_level else 'sequence'}.{hint}"
            )
        return found.detach().to(torch.float64)
