"""Reward functions: found by dotted path, called on completions, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rlobjectives.causal_lm.dotted import import_object
from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.scores import reward_matrix

__all__ = ["RewardFunction", "RewardFunctions"]

RewardFunction = Callable[..., Sequence[float | None]]
"""``reward(prompts, completions, **columns) -> one number per completion, or None where it cannot score``."""


class RewardFunctions:
    """Several reward functions, called one after the other on the same completions.

    A function is called as ``reward(prompts, completions, **columns)``: the prompts as they stand in the data,
    the completions as text, and every other column of the data by its name, each a list with one entry a
    completion. The lists are its own: what it does to them, no other function sees. It returns one number per
    completion, as a list, a tensor or an array; None (or NaN) says that it cannot score that one, which becomes an
    unscored cell and never a number.

    Args:
        functions: Callables, or dotted paths to them. The order is that of the estimator's weights; names in
            metrics are the functions' names.

    Raises:
        CapabilityError: If there are none, two share a name, or one cannot be called like that.
        CapabilityError: If a dotted path names nothing.

    Example:
        >>> def short(prompts, completions, **columns):
        ...     return [1.0 if len(text) < 3 else None for text in completions]
        >>> rewards, scored, names = RewardFunctions([short])(["a", "b"], ["x", "long"], {})
        >>> rewards.tolist(), scored.tolist(), names
        ([[1.0], [0.0]], [[True], [False]], ('short',))
    """

    def __init__(self, functions: Sequence[str | RewardFunction]) -> None:
        if isinstance(functions, str) or not isinstance(functions, Sequence):
            raise CapabilityError(
                f"rewards is {functions!r}; expected a list of reward functions or dotted paths, such as [{functions}]."
            )
        self._functions: dict[str, RewardFunction] = {}
        for given in functions:
            function = import_object(given, "reward") if isinstance(given, str) else given
            _check_function(function, given)
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
            CapabilityError: If a function does not take the data's columns, or a column's name is taken.
            ShapeError: If a function returns anything but one real number or None a completion.
        """
        taken = sorted({"prompts", "completions"} & columns.keys())
        if taken:
            raise CapabilityError(
                f"The data have a column called {' and one called '.join(taken)}, the name of what every reward "
                "function is given anyway: reward(prompts, completions, **columns). Rename the column."
            )
        count = len(completions)
        table: dict[str, Sequence[float | None]] = {}
        for name, function in self._functions.items():
            given = {column: list(values) for column, values in columns.items()}
            _check_call(name, function, given)
            scores: Any = function(list(prompts), list(completions), **given)
            if isinstance(scores, (Tensor, np.ndarray)):
                scores = scores.tolist()
            if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != count:
                got = f"{len(scores)} scores" if isinstance(scores, Sequence) else type(scores).__name__
                raise ShapeError(
                    f"reward {name!r} returned {got} for {count} completions; expected a list with one number "
                    "(or None) a completion."
                )
            table[name] = scores
        return reward_matrix(table)


def _check_function(function: Any, given: object) -> None:
    if not callable(function):
        raise CapabilityError(f"reward {given!r} is a {type(function).__name__}; expected a function.")
    if inspect.isclass(function):
        raise CapabilityError(
            f"reward {given!r} is a class; expected a function, or an object of the class that can be called."
        )
    if isinstance(given, str) and getattr(function, "__module__", None) == "builtins":
        raise CapabilityError(
            f"reward {given!r} is one of Python's own functions; expected a reward function."
        )
    if inspect.iscoroutinefunction(function):
        raise CapabilityError(
            f"reward {given!r} is asynchronous; expected an ordinary function (asyncio.run inside it can wait)."
        )
    try:
        inspect.signature(function).bind_partial([], [])
    except TypeError as error:
        raise CapabilityError(
            f"reward {given!r} cannot be called as reward(prompts, completions, **columns): {error}."
        ) from error
    except ValueError:  # some compiled functions do not tell
        return


def _check_call(name: str, function: RewardFunction, columns: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what does not take the columns before it runs: a TypeError from inside it would look the same."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind([], [], **columns)
    except TypeError as error:
        raise CapabilityError(
            f"reward {name!r} has the signature {name}{signature}, but is called as reward(prompts, completions, "
            f"**columns) with the data's columns {', '.join(columns) or '(none)'}: {error}. Let it take **columns for "
            "those that it does not read, and give the data those that it does."
        ) from error
