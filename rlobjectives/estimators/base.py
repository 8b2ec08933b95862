"""The estimator: rewards in, advantages out, in two steps."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.component import Component, WindowContext
from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.groups import group_extremes
from rlobjectives.maths.reward_sum import weights_in_order
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat

__all__ = ["Estimator"]


class Estimator(Component):
    """Turns rollouts into advantages.

    `estimate` looks at whole prompt groups and talks to nobody. `finalize` turns the estimate into
    advantages with what the window knows (whitening, counts). Value targets are made between the
    two, from the raw estimate.

    Not every row counts: dummies, and sequences that were dropped (dynamic sampling), are left out of the layout's
    ``sequence_mask()``, and a sequence that no reward scored has no reward at all. In `estimate`, `Rollouts.counted` and
    `Rollouts.group_mean` leave them out; in `statistics`, the layout's ``sequence_mask()``, because what is dropped may be
    known only after the estimate.

    Attributes:
        token_level: True when `estimate` gives one advantage per token, else one per sequence.
        refuses: Data that `estimate` reports as an error, whatever its options: of ``"negative_rewards"``,
            ``"unscored_sequences"``, ``"sequences_without_positions"``, ``"rewards_without_tokens"`` and
            ``"observation_rewards"``. `rlobjectives.testing` leaves it out of its windows.
        shift_invariant: Whether the same number added to every reward of a prompt leaves its advantages as they are, for
            an estimator that compares the answers to one prompt.

    Example:
        Rewards, standardised over the sequences of the optimizer step that count::

        >>> from dataclasses import dataclass
        >>> from rlobjectives import Moments, Objective, PaddedLayout
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Standardised(Estimator):
        ...     window_statistics = {"rewards": Moments}
        ...     estimate_columns = ("reward", "counted")
        ...     def estimate(self, rollouts):
        ...         return torch.stack([rollouts.rewards.sum(1), rollouts.counted.double()], dim=1)
        ...     def statistics(self, estimate, layout):
        ...         counted = layout.sequence_mask() & (self.column(estimate, "counted") > 0)
        ...         return {"rewards": Moments.of(self.column(estimate, "reward"), counted)}
        ...     def finalize(self, estimate, layout, context):
        ...         reward, counted = estimate.unbind(1)
        ...         white = (reward - context["rewards"].mean) / context["rewards"].std(ddof=1)
        ...         return torch.where(counted > 0, white, 0.0)
        >>> kept = torch.tensor([True, True, True, True, False, False])
        >>> layout, objective = PaddedLayout(kept.unsqueeze(1), sequence_mask=kept), Objective(estimator=Standardised())
        >>> rewards, group_ids = torch.tensor([1, 0, 0, -1, 5, 5]), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> estimate = objective.estimator.estimate(Rollouts(rewards=rewards, group_ids=group_ids))
        >>> objective.freeze([(estimate, layout)]).advantages(estimate, layout).flatten()[:4]
        tensor([ 1.2247,  0.0000,  0.0000, -1.2247], dtype=torch.float64)
    """

    token_level: ClassVar[bool] = False
    refuses: ClassVar[frozenset[str]] = frozenset()
    shift_invariant: ClassVar[bool] = True

    @property
    def estimate_columns(self) -> tuple[str, ...]:
        """Names of the columns of `estimate`, the raw advantage first; none where there is a single one."""
        return ()

    @property
    def columns(self) -> int:
        """Numbers that `estimate` gives for each sequence or token: as many as have names, 1 where none has."""
        return max(1, len(self.estimate_columns))

    def column(self, estimate: Tensor, name: str) -> Tensor:
        """One of the named columns of an estimate, ``[n]`` or shaped like the mask."""
        return estimate[..., self.estimate_columns.index(name)]

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
    def compares_window(self) -> bool:
        """Whether an advantage is one against the window's other sequences, so that a lone sequence gets 0."""
        return False

    def few_samples(self, context: WindowContext) -> Tensor | None:
        """Whether the window is whitened over fewer than two counted samples, so that every advantage is 0.

        `WindowBuilder.freeze` warns where it is so.

        Args:
            context: Merged statistics of the window.

        Returns:
            0-d bool; None if nothing is whitened.
        """
        del context
        return None

    @property
    def reward_kl_coef(self) -> float:
        """Weight β of the divergence from the reference policy in the rewards; 0 where there is none of it."""
        coef: float = getattr(self, "kl_coef", 0.0)
        return coef

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """A divergence from the reference that is charged twice, and a window in which nobody can be compared."""
        yield from super().conflicts(parts, facts)
        count = facts.window_sequences
        if self.compares_window and count is not None and count < 2:
            yield (
                f"{type(self).__name__} compares the sequences of an optimizer step with each other, and a step here "
                f"has {count}: every advantage would be 0, for ever. Let a step have at least 2"
                + (f" ({facts.window_settings})." if facts.window_settings else ".")
            )
        kl = parts.get("kl")
        if getattr(kl, "coef", 0.0) > 0.0 and self.reward_kl_coef > 0.0:
            yield (
                f"{type(self).__name__} charges the divergence from the reference policy in the rewards (kl_coef = "
                f"{self.reward_kl_coef}), and kl charges it again in the loss ({kl}). Keep one: set kl_coef=0.0 of the "
                "estimator, or leave kl out."
            )

    def refused(self) -> frozenset[str]:
        """What this very instance reports as an error: `refuses`, and what ``on_lost_reward`` and the like say."""
        options = {"on_lost_reward": "rewards_without_tokens", "on_observation_reward": "observation_rewards"}
        return self.refuses | {data for name, data in options.items() if getattr(self, name, "") == "error"}

    @property
    def reads_observations(self) -> bool:
        """Whether it reads masked tokens between actions, as ``observations="step"`` does."""
        return getattr(self, "observations", "skip") == "step"

    @property
    def waits_for_device(self) -> bool:
        """Whether `estimate` looks at data on the host, once per rollout, as contradictory sessions take."""
        return getattr(self, "reward_scope", "segment") != "segment"

    @property
    def zero_for_equal_rewards(self) -> bool:
        """Whether a prompt whose answers all have the same reward has advantages of exactly 0."""
        return True

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
        looked at. Only for estimators of one number per sequence.

        Args:
            rollouts: Whole prompt groups.
            estimate: What `estimate` gave for them, where that is known already.

        Returns:
            Bool ``[g]``, in the order of `Rollouts.groups`.

        Raises:
            ShapeError: If this estimator gives one advantage per token.
        """
        if self.token_level:
            raise ShapeError(
                f"{type(self).__name__} gives one advantage per token; carries_signal judges groups of "
                "sequences. Use a group estimator to filter groups."
            )
        estimate = self.estimate(rollouts) if estimate is None else estimate
        combined = (estimate if estimate.dim() == 1 else estimate[:, 0]).to(torch.float32)
        genuine = rollouts.genuine.to(combined.device).unsqueeze(1)
        low, high = group_extremes(combined.unsqueeze(1), genuine, rollouts.groups)
        return (low < high).squeeze(1)
