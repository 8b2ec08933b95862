"""What a part needs, forbids and supports, checked once against what the trainer offers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rlobjectives._moved import moved_names
from rlobjectives.checks import check_choice, shown
from rlobjectives.columns import COLUMNS, OLD_FACTS, OLD_NEEDS
from rlobjectives.errors import CapabilityError
from rlobjectives.options import check_fields, option

__all__ = ["Capabilities", "TrainerFacts"]

T = TypeVar("T")
Flags = Mapping[str, "bool | None"]


def _old_flags(
    option: str, old: Mapping[str, str], joined: Callable[[Any, Flags], object]
) -> Callable[[type[T]], type[T]]:
    """Let a class take one flag per column, as it did before it took columns by name."""

    def taught(kind: type[T]) -> type[T]:
        made = kind.__init__

        @functools.wraps(made)
        def init(self: T, **given: Any) -> None:
            flags = {name: given.pop(name) for name in old if name in given}
            if flags:
                warnings.warn(
                    f"{kind.__name__}({', '.join(flags)}): name columns in {option}", DeprecationWarning, 2
                )
                columns = {old[name]: flag for name, flag in flags.items() if old[name]}
                given[option] = joined(given.get(option, ()), columns)
            made(self, **given)

        init.old_flags = tuple(old)  # type: ignore[attr-defined]  # for whoever lists what it takes
        kind.__init__ = init  # type: ignore[assignment, method-assign]
        return kind

    return taught


@_old_flags(
    "reads",
    OLD_NEEDS,
    lambda reads, flags: frozenset({*reads, *(name for name, flag in flags.items() if flag)}),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declared once on each part and merged by `Objective`.

    Needs, requirements and prohibitions merge by *or*, support by *and*, minima by *max*.

    Attributes:
        reads: Columns that it cannot do without; follows from what a part declares in ``reads``.
        needs_prepass: Reads the whole window's log-probabilities before the first loss.
        min_group_size: Completions per prompt it needs at least.
        requires_on_policy: One update per rollout, no staleness: there is no ratio to correct with.
        requires_sampled_distribution: Its ratio is taken against the distribution that sampled, so
            truncated sampling needs log-probabilities of the truncated distribution.
        forbids_normalize_advantages: A second normalisation would change the objective.
        communicates_in_loss: Its loss itself sums over the context-parallel ranks, so a loss that is computed
            again in the backward pass would repeat that exchange.
        depends_on_cut: Another cut of the window into micro-batches gives another loss, on purpose.
        supports_context_parallel: Works when a sequence's tokens lie on several ranks.
        supports_partial_window: Works when a prompt's completions fall into different windows.

    Example:
        >>> Capabilities(min_group_size=2).merge(Capabilities(needs_prepass=True)).min_group_size
        2
    """

    reads: frozenset[str] = frozenset()
    needs_prepass: bool = False
    min_group_size: int = 1
    requires_on_policy: bool = False
    requires_sampled_distribution: bool = False
    forbids_normalize_advantages: bool = False
    communicates_in_loss: bool = False
    depends_on_cut: bool = False
    supports_context_parallel: bool = True
    supports_partial_window: bool = True

    def merge(self, other: Capabilities) -> Capabilities:
        """The capabilities of both parts together."""
        merged: dict[str, object] = {}
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name.startswith("min_"):
                merged[one.name] = max(mine, theirs)
            elif one.name.startswith("supports_"):
                merged[one.name] = mine and theirs
            else:
                merged[one.name] = mine | theirs
        return Capabilities(**merged)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> bool:
        """A flag of the version before."""
        if name in OLD_NEEDS:
            return OLD_NEEDS[name] in self.reads
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def needs(self) -> tuple[str, ...]:
        """The flags that ask something of the trainer, in words, for tables."""
        known = (one for name, one in COLUMNS.items() if name in self.reads and not one.follows)
        sources = [one.source or one.name for one in known]
        words = [*dict.fromkeys(sources), *(name for name in sorted(self.reads) if name not in COLUMNS)]
        if self.needs_prepass:
            words.append("a pass over the window before its losses")
        if self.min_group_size > 1:
            words.append(f"{self.min_group_size}+ completions per prompt")
        if self.requires_on_policy:
            words.append("one update per rollout")
        return tuple(words)


@_old_flags(
    "offers",
    OLD_FACTS,
    lambda offers, flags: {
        **dict(offers),
        **{name: flag for name, flag in flags.items() if flag is not None},
    },
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """What a trainer tells about itself at set-up. None means: not known, not checked.

    Only a sampler that cuts its distribution is held to say which log-probabilities it gives: unknown ones count
    as those of the uncut distribution.

    Attributes:
        num_generations: Completions sampled per prompt.
        num_rewards: Reward functions.
        reward_names: Their names, in order.
        window_sequences: Sequences of an optimizer step over all ranks, as configured: the fewest that any step has before
            something is dropped.
        window_settings: Which settings of the trainer decide that, in words, for messages.
        updates_per_rollout: Optimizer steps taken on one rollout's samples (epochs included).
        max_staleness: Rollouts by which the sampler may lag behind the trainer.
        temperature: Sampling temperature.
        policy_temperature: The one at which the trained policy's log-probabilities are taken; None: the same.
        top_p: Nucleus mass kept when sampling (1 keeps all).
        top_k: Tokens kept when sampling (0 or None keeps all).
        min_p: Relative probability floor when sampling (0 or None keeps all).
        behavior_logprobs: ``"sampled"`` when the rollout's log-probabilities are those of the
            truncated, renormalised distribution; ``"untruncated"`` when not; ``"none"`` without.
        normalize_advantages: The trainer whitens advantages itself.
        offers: Columns by name, the library's and a user's own: True where the trainer gives them, False where it cannot.
            Without ``values`` there are no ``returns`` either, and so on.
        can_prepass: The trainer can run the window's forward once more before the losses.
        context_parallel_size: Ranks that share one sequence's tokens.
        whole_groups_per_window: All completions of a prompt are in one optimizer step.
        dropout: Largest dropout probability active in a training forward, adapters (LoRA) included.
        forward_side_effects: What a training forward changes besides its output and the random state, in
            words: ``("FP8 scaling factors", "batch-norm statistics")``.
        recomputes_loss: The loss itself is inside an activation checkpoint and computed twice.
        old_logprobs: ``"recomputed"`` by the trainer, or ``"behavior"`` when the sampler's are used in
            their place.
        importance_correction: The trainer already weights tokens for the mismatch with the sampler.
    """

    num_generations: int | None = option(None, low=1)
    num_rewards: int | None = option(None, low=0)
    reward_names: tuple[str, ...] | None = None
    window_sequences: int | None = option(None, low=1)
    window_settings: str | None = None
    updates_per_rollout: int | None = option(None, low=1)
    max_staleness: int | None = option(None, low=0)
    temperature: float | None = option(None, low=0)
    policy_temperature: float | None = option(None, low=0)
    top_p: float | None = option(None, low=0, high=1)
    top_k: int | None = option(None, low=-1)  # some samplers say −1 for all
    min_p: float | None = option(None, low=0, high=1)
    behavior_logprobs: str | None = None
    normalize_advantages: bool | None = None
    offers: Mapping[str, bool] = field(default_factory=dict)
    can_prepass: bool | None = None
    context_parallel_size: int | None = option(None, low=1)
    whole_groups_per_window: bool | None = None
    dropout: float | None = option(None, low=0, high=1)
    forward_side_effects: tuple[str, ...] | None = None
    recomputes_loss: bool | None = None
    old_logprobs: str | None = None
    importance_correction: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, example in (("forward_side_effects", "BatchNorm statistics"), ("reward_names", "correct")):
            texts = getattr(self, name)
            listed = isinstance(texts, (tuple, list)) and all(isinstance(one, str) for one in texts)
            if texts is not None and not listed:
                raise CapabilityError(
                    f"{name} is {shown(texts)}; expected several texts, such as ({example!r},)."
                )
        if self.behavior_logprobs is not None:
            check_choice("behavior_logprobs", self.behavior_logprobs, ("sampled", "untruncated", "none"))
        if self.old_logprobs is not None:
            check_choice("old_logprobs", self.old_logprobs, ("recomputed", "behavior"))
        if not isinstance(self.offers, Mapping):
            raise CapabilityError(
                f'offers is {shown(self.offers)}; expected a mapping such as {{"values": False}}.'
            )
        for name, flag in self.offers.items():
            if not isinstance(flag, bool):
                raise CapabilityError(f"offers[{name!r}] is {shown(flag)}; expected True or False.")

    def __getattr__(self, name: str) -> bool | None:
        """A fact of the version before."""
        if name in OLD_FACTS:
            return self.offers.get(OLD_FACTS[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def gives(self, name: str) -> bool | None:
        """Whether the trainer gives a column; None where that is not known.

        Example:
            >>> facts = TrainerFacts(offers={"values": False})
            >>> facts.gives("returns"), facts.gives("entropy")
            (False, None)
        """
        if name in self.offers:
            return self.offers[name]
        if name == "behavior_logprobs" and self.behavior_logprobs is not None:
            return self.behavior_logprobs != "none"
        known = COLUMNS.get(name)
        absent = known is not None and known.follows and self.gives(known.follows) is False
        return False if absent else None

    def truncation(self) -> str | None:
        """The sampler settings that cut the distribution, in words, or None."""
        cuts = []
        if self.top_p is not None and self.top_p < 1.0:
            cuts.append(f"top_p = {self.top_p}")
        if self.top_k is not None and self.top_k > 0:
            cuts.append(f"top_k = {self.top_k}")
        if self.min_p is not None and self.min_p > 0.0:
            cuts.append(f"min_p = {self.min_p}")
        return ", ".join(cuts) or None


__getattr__ = moved_names(__name__)
