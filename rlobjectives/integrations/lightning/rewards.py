"""Reward functions: found by dotted path, called on completions, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.integrations.lightning.dotted import import_object
from rlobjectives.rollouts import reward_matrix

__all__ = ["RewardFunction", "RewardFunctions"]

RewardFunction = Callable[..., Sequence[float | None]]
"""``reward(prompts, completions, **columns) -> one number a completion, or None where it cannot score``."""


class RewardFunctions:
    """Several reward functions, called one after the other on the same completions.

    A function is called as ``reward(prompts, completions, **columns)``: the prompts as they stand in the data,
    the completions as text, and every other column of the data by its name, each a list with one entry a
    completion. It returns one number a completion; None (or NaN) says that it cannot score that one, which
    becomes an unscored cell and never a number.

    Args:
        functions: Callables, or dotted paths to them. The order is that of the estimator's weights; names in
            metrics are the functions' names.

    Raises:
        CapabilityError: If there are none, two share a name, or one is not callable.
        CapabilityError: If a dotted path names nothing.

    Example:
        >>> def short(prompts, completions, **columns):
        ...     return [1.0 if len(text) < 3 else None for text in completions]
        >>> rewards, scored, names = RewardFunctions([short])(["a", "b"], ["x", "long"], {})
        >>> rewards.tolist(), scored.tolist(), names
        ([[1.0], [0.0]], [[True], [False]], ('short',))
    """

    def __init__(self, functions: Sequence[str | RewardFunction]) -> None:
        self._functions: dict[str, RewardFunction] = {}
        for given in functions:
            function = import_object(given, "reward") if isinstance(given, str) else given
            if not callable(function):
                raise CapabilityError(
                    f"reward {given!r} is a {type(function).__name__}; expected a function."
                )
            name = str(getattr(function, "__name__", type(function).__name__))
            if name in self._functions:
                raise CapabilityError(
                    f"Two reward functions are called {name!r}; names tell rewards apart in metrics and weights. "
                    "Rename one."
                )
            self._functions[name] = function
        if not self._functions:
            raise CapabilityError("rewards is empty; expected at least one reward function or dotted path.")

    def __len__(self) -> int:
        """Number of functions."""
        return len(self._functions)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self._functions)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Score completions.

        Returns:
            ``rewards`` float64 ``[n, r]``, ``scored`` bool ``[n, r]``, and the names.

        Raises:
            ShapeError: If a function returns anything but one real number or None a completion.
        """
        table: dict[str, Sequence[float | None]] = {}
        for name, function in self._functions.items():
            scores: Any = function(prompts, completions, **columns)
            if isinstance(scores, Tensor):
                scores = scores.tolist()
            if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != len(completions):
                got = f"{len(scores)} scores" if isinstance(scores, Sequence) else type(scores).__name__
                raise ShapeError(
                    f"reward {name!r} returned {got} for {len(completions)} completions; expected a list with "
                    "one number (or None) a completion."
                )
            table[name] = scores
        return reward_matrix(table)
