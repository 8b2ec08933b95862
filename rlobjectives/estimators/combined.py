"""A weighted sum of estimators, each normalised in its own way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.checks import check_numbers, shown
from rlobjectives.columns import Read, merged
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.layouts import TokenLayout
from rlobjectives.maths.groups import group_largest
from rlobjectives.maths.reward_sum import DOUBLE_UNIT
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat

__all__ = ["Combined"]

_ROUNDING = 32 * DOUBLE_UNIT
"""What is left of advantages that cancel, relative to them."""


@dataclass(frozen=True, kw_only=True)
class Combined(Estimator):
    """Weighted sum of several estimators' advantages.

        Aₜ = Σⱼ wⱼ·Aₜ⁽ʲ⁾        each A⁽ʲ⁾ finalised (whitened, scaled) by its own estimator

    Estimators of one advantage per sequence and of one per token mix freely; a per-token teacher signal next to
    an outcome reward is ``Combined(estimators=(GRPO(), TeacherSignal(coef=0.5)))``. All read the same
    rollouts: give each its reward columns by its own ``weights``. A critic learns the targets of the estimator that
    reads it, whatever that one weighs here; one critic cannot learn the targets of two.

    Args:
        estimators: At least one; none of them another `Combined`.
        weights: One weight an estimator; None weighs all 1.

    Raises:
        CapabilityError: Without estimators, or with weights that do not match.

    Source:
        The sum of an outcome advantage and a token-level signal, as asked for in TRL; Relax adds the
        teacher's after the estimator in the same way.

    Example:
        >>> from rlobjectives import GRPO, RLOO
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]))
        >>> both = Combined(estimators=(GRPO(scale="none"), RLOO()), weights=(1.0, 0.5))
        >>> both.estimate(rollouts)[:, 0]
        tensor([ 1., -1.], dtype=torch.float64)
    """

    estimators: tuple[Estimator, ...] = ()
    weights: tuple[float, ...] | None = None

    def check(self) -> None:
        """Several estimators, with a weight each."""
        if not isinstance(self.estimators, Iterable) or isinstance(self.estimators, Tensor):
            raise CapabilityError(
                f"estimators is {shown(self.estimators)}; expected several, as in Combined(estimators=(GRPO(), …))."
            )
        parts: tuple[object, ...] = tuple(self.estimators)
        object.__setattr__(self, "estimators", parts)
        for part in parts:
            if not isinstance(part, Estimator) or isinstance(part, Combined):
                raise CapabilityError(
                    f"estimators holds {shown(part)}; expected instances of Estimator, none of them a Combined."
                )
        if not self.estimators:
            raise CapabilityError("Combined has no estimators. Give at least one.")
        check_numbers("weights", self.weights)
        if self.weights is not None and len(self.weights) != len(self.estimators):
            raise CapabilityError(
                f"Combined has {len(self.weights)} weights for {len(self.estimators)} estimators. Give one each."
            )

    @property
    def token_level(self) -> bool:  # type: ignore[override]  # depends on what is combined
        """Whether any of the estimators gives one advantage per token."""
        return any(part.token_level for part in self.estimators)

    def required(self) -> Capabilities:
        """What all of the estimators together require."""
        found = self.capabilities
        for part in self.estimators:
            found = found.merge(part.required())
            if self.token_level and not part.token_level and part.declared_statistics():
                # Its sequences are counted where their first token is, which context ranks do not share.
                found = found.merge(Capabilities(supports_context_parallel=False))
        return found

    def declared_reads(self) -> tuple[Read, ...]:
        """What any of the estimators reads."""
        return tuple(merged(one for part in self.estimators for one in part.declared_reads()).values())

    def refused(self) -> frozenset[str]:
        """What any of the estimators refuses, and a sequence without any position to carry its numbers."""
        found = {data for part in self.estimators for data in part.refused()}
        return frozenset({*found, "sequences_without_positions"} if self.token_level else found)

    @property
    def reads_observations(self) -> bool:
        """Whether any of the estimators does."""
        return any(part.reads_observations for part in self.estimators)

    @property
    def waits_for_device(self) -> bool:
        """Whether any of the estimators does."""
        return any(part.waits_for_device for part in self.estimators)

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]  # depends on what is combined
        """Whether all of the estimators are."""
        return all(part.shift_invariant for part in self.estimators)

    @property
    def zero_for_equal_rewards(self) -> bool:
        """Whether it is so for all of the estimators, and all compare the answers to one prompt."""
        return all(
            part.zero_for_equal_rewards and part.required().min_group_size > 1 for part in self.estimators
        )

    @property
    def columns(self) -> int:
        """The weighted sum, and everybody's own."""
        return 1 + sum(part.columns for part in self.estimators)

    def declared_statistics(self) -> dict[str, type[Stat]]:
        """The statistics of every estimator, under its position."""
        return {
            f"{position}/{name}": kind
            for position, part in enumerate(self.estimators)
            for name, kind in part.declared_statistics().items()
        }

    def declared_metrics(self) -> dict[str, Metric]:
        """The metrics of every estimator."""
        return {name: metric for part in self.estimators for name, metric in part.declared_metrics().items()}

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """What any of the estimators objects to."""
        yield from super().conflicts(parts, facts)
        others = {name: part for name, part in parts.items() if name != "kl"}  # said above
        for part in self.estimators:
            yield from part.conflicts(others, facts)

    def few_samples(self, context: WindowContext) -> Tensor | None:
        """Whether any of the estimators has too few samples."""
        found = [
            few
            for position, part in enumerate(self.estimators)
            if (few := part.few_samples(_own(context, position))) is not None
        ]
        return torch.stack(found).any() if found else None

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """``[n, 1 + k]`` or ``[*tokens, 1 + k]``: the weighted raw sum, then everybody's own columns."""
        columns: list[Tensor] = []
        for part in self.estimators:
            own = part.estimate(rollouts)
            plain = own.dim() == (len(rollouts.tokens("Combined").shape) if part.token_level else 1)
            own = own.unsqueeze(-1) if plain else own
            if plain and isinstance(part, Normalized) and part.sums_rewards:
                own = torch.nn.functional.pad(own, (0, part.columns - 1))  # nothing was added up: no rounding
            if own.shape[-1] != part.columns:
                raise CapabilityError(
                    f"{type(part).__name__}.estimate gives {own.shape[-1]} columns but declares {part.columns}. "
                    "Say how many in its property `columns`."
                )
            if self.token_level and not part.token_level:
                layout = rollouts.tokens("Combined")
                _check_positions(part, layout)
                own = torch.stack([layout.expand(column) for column in own.unbind(1)], dim=-1)
            columns.append(own)
        pairs = list(zip(self._weights(), columns, strict=True))
        total = torch.stack([weight * own[..., :1] for weight, own in pairs]).sum(0)
        if not self.token_level:
            size = torch.stack([(weight * own[..., :1]).abs() for weight, own in pairs]).sum(0)
            known, groups = rollouts.genuine.unsqueeze(1), rollouts.groups
            left = ~(
                group_largest(total.abs(), known, groups) <= _ROUNDING * group_largest(size, known, groups)
            )
            total = torch.where(left[groups.index], total, 0.0)
        return torch.cat([total, *columns], dim=-1)

    def reward_weights(self, names: tuple[str, ...]) -> tuple[float, ...] | None:
        """Those of the first part that compares the answers to one prompt: ``weights`` here are those of the parts."""
        parts = [part for part in self.estimators if part.compares_siblings]
        return (*parts, *self.estimators)[0].reward_weights(names)

    @property
    def reward_kl_coef(self) -> float:
        """The largest of the estimators'."""
        return max(part.reward_kl_coef for part in self.estimators)

    @property
    def compares_siblings(self) -> bool:
        """Whether any of the estimators does."""
        return any(part.compares_siblings for part in self.estimators)

    def carries_signal(self, rollouts: Rollouts, estimate: Tensor | None = None) -> Tensor:
        """Whether the sum differs within each group, or a part has a reason of its own (`BatchBaseline`)."""
        signal = super().carries_signal(rollouts, estimate)
        for part, weight in zip(self.estimators, self._weights(), strict=True):
            if weight and type(part).carries_signal is not Estimator.carries_signal:
                signal = signal | part.carries_signal(rollouts)
        return signal

    def value_estimators(self) -> tuple[Estimator, ...]:
        """The estimators that read the critic, each once."""
        found: list[Estimator] = []
        for part in self.estimators:
            found += [one for one in part.value_estimators() if one not in found]
        return tuple(found)

    def value_targets(self, rollouts: Rollouts) -> Tensor:
        """The targets of the one estimator that reads the critic.

        Raises:
            CapabilityError: If none does, or several with different options, whose targets are different.
        """
        readers = self.value_estimators()
        if len(readers) > 1:
            raise CapabilityError(several_value_targets(self))
        return readers[0].value_targets(rollouts) if readers else super().value_targets(rollouts)

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        """The statistics of every estimator, from its own columns.

        Raises:
            CapabilityError: If an estimator's numbers would be lost with a sequence that has no position here.
        """
        for part in self.estimators:
            if self.token_level and not part.token_level:
                _check_positions(part, layout)
        return {
            f"{position}/{name}": stat
            for position, (part, own) in enumerate(self._split(estimate, layout))
            for name, stat in part.statistics(own, layout).items()
        }

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        """Finalise every estimator with its own statistics, and add."""
        weighted = []
        for position, (part, own) in enumerate(self._split(estimate, layout)):
            final = part.finalize(own, layout, _own(context, position))
            if self.token_level and not part.token_level:
                final = layout.expand(final)
            weighted.append(self._weights()[position] * final)
        together = torch.stack(weighted)
        total, size = together.sum(0), together.abs().sum(0)
        return torch.where(
            total.abs() < _ROUNDING * size, 0.0, total
        )  # so that NaN and infinity stay visible

    def _weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.estimators)

    def _split(self, estimate: Tensor, layout: TokenLayout) -> Iterator[tuple[Estimator, Tensor]]:
        start = 1
        for part in self.estimators:
            own = estimate[..., start : start + part.columns]
            start += part.columns
            if self.token_level and not part.token_level:
                own = layout.first(own)
            yield part, own.squeeze(-1) if part.columns == 1 else own


def _own(context: WindowContext, position: int) -> WindowContext:
    """What the estimator at a position may know."""
    prefix = f"{position}/"
    statistics = {
        name.removeprefix(prefix): stat
        for name, stat in context.statistics.items()
        if name.startswith(prefix)
    }
    return dataclasses.replace(context, statistics=statistics)


def several_value_targets(estimator: Estimator) -> str:
    """What is wrong where a critic would have to learn the targets of more than one estimator."""
    names = ", ".join(type(one).__name__ for one in estimator.value_estimators())
    return (
        f"{type(estimator).__name__} holds {len(estimator.value_estimators())} different estimators that read a critic "
        f"({names}), and one critic cannot learn the targets of all. Keep one of them, or give them the same options."
    )


def _check_positions(part: Estimator, layout: TokenLayout) -> None:
    # A sequence's numbers travel on its tokens, so one without any position would not be counted.
    if layout.num_sequences and layout.shortest == 0 and part.declared_statistics():
        raise CapabilityError(
            f"Combined spreads the numbers of {type(part).__name__} over tokens, but some sequence has no "
            "position at all, so the window would miss it. Give each at least one (masked) position."
        )
