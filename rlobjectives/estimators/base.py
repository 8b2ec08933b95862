"""The estimator: rewards in, advantages out, in two steps."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.component import Component, WindowContext
from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.estimators.groups import group_extremes
from rlobjectives.estimators.reward_sum import weights_in_order
from rlobjectives.layouts import TokenLayout
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat

__all__ = ["Estimator"]


class Estimator(Component):
    """Turns rollouts into advantages.

    `estimate` looks at whole prompt groups and talks to nobody. `finalize` turns the estimate into
    advantages with what the window knows (whitening, counts). Value targets are made between the
    two, from the raw estimate.

    Attributes:
        token_level: True when `estimate` gives one number a token, else one a sequence.
    """

    token_level: ClassVar[bool] = False

    @property
    def columns(self) -> int:
        """Numbers that `estimate` gives for each sequence or token: 1 unless it says otherwise."""
        return 1

    @abc.abstractmethod
    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Raw advantages of whole groups.

        Args:
            rollouts: All completions of each prompt that is present.

        Returns:
            ``[n]`` or, when `token_level`, shaped like the layout's mask. One dimension more, ``[n, k]`` or
            ``[*tokens, k]``, when `finalize` needs more than the number itself: the first column is the
            raw advantage, the others are this part's own. Float64 for sequences; for tokens the precision
            of the columns read, float32 at least. No gradient.
        """

    def value_targets(self, rollouts: Rollouts) -> Tensor:
        """What a critic should learn to predict at each token, never touched by normalisation.

        Returns:
            Shaped like the layout's mask; 0 where it is false. No gradient.

        Raises:
            CapabilityError: If this estimator has no use for a critic.
        """
        del rollouts
        raise CapabilityError(
            f"{type(self).__name__} reads no critic, so it has no value targets. Choose GAE, or train "
            "without a critic."
        )

    def value_estimators(self) -> tuple[Estimator, ...]:
        """The different estimators that have something for a critic to learn: none, this one, or those it is made of."""
        return () if type(self).value_targets is Estimator.value_targets else (self,)

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """What `finalize` must know about the window, from one micro-batch's estimate."""
        del estimate, layout
        return {}

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Advantages of one micro-batch: the estimate itself, unless a subclass knows better.

        Args:
            estimate: The micro-batch's rows of `estimate`.
            layout: Its layout.
            context: Merged statistics of the window. An estimator without statistics of its own may be asked
                before the window's counts are known.

        Returns:
            ``[n]``, or shaped like the mask.
        """
        del layout, context
        return estimate

    @property
    def compares_siblings(self) -> bool:
        """Whether it judges an answer by the others to the same prompt, so that a group may have nothing to teach."""
        return self.required().min_group_size > 1

    def reward_weights(self, names: tuple[str, ...]) -> tuple[float, ...] | None:
        """What each reward column weighs in this estimator's eyes; None weighs all 1.

        Diagnostics combine raw rewards by it. By default the option ``weights``, where an estimator has it.

        Args:
            names: Of the rewards, in column order.

        Returns:
            One weight a column, or None.

        Raises:
            CapabilityError: If there is not exactly one weight for each of the names.
        """
        return weights_in_order(type(self).__name__, getattr(self, "weights", None), names)

    def carries_signal(self, rollouts: Rollouts, estimate: Tensor | None = None) -> Tensor:
        """Whether each group's combined raw advantage differs between its members.

        Judged in float32, the precision it is used in: the test a dynamic-sampling filter wants. Dummies are not
        looked at. Only for estimators of one number a sequence.

        Args:
            rollouts: Whole prompt groups.
            estimate: What `estimate` gave for them, where that is known already.

        Returns:
            Bool ``[g]``, in the order of `Rollouts.groups`.

        Raises:
            ShapeError: If this estimator gives one advantage a token.
        """
        if self.token_level:
            raise ShapeError(
                f"{type(self).__name__} gives one advantage a token; carries_signal judges groups of "
                "sequences. Use a group estimator to filter groups."
            )
        estimate = self.estimate(rollouts) if estimate is None else estimate
        combined = (estimate if estimate.dim() == 1 else estimate[:, 0]).to(torch.float32)
        genuine = rollouts.genuine.to(combined.device).unsqueeze(1)
        low, high = group_extremes(combined.unsqueeze(1), genuine, rollouts.groups)
        return (low < high).squeeze(1)
