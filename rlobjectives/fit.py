"""Whether the parts of an objective fit each other and the trainer, in sentences."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.columns import COLUMNS, Column, Read, read
from rlobjectives.component import Component
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.base import Estimator

__all__ = ["check", "conflicts_of", "lacking", "reads_of", "two_normalisations"]


def check(name: str, capabilities: Capabilities, facts: TrainerFacts, extra: Iterable[str] = ()) -> None:
    """Raise one `CapabilityError` that lists every mismatch between an objective and a trainer.

    Args:
        name: What to call the objective in the message.
        capabilities: Merged capabilities of its parts.
        facts: What the trainer says.
        extra: Violations the parts found by themselves.
    """
    found = [*_violations(capabilities, facts), *extra]
    if found:
        head = (
            f"{name} cannot run here"
            if len(found) == 1
            else f"{name} cannot run here, for {len(found)} reasons"
        )
        raise CapabilityError("\n  - ".join([f"{head}:", *found]))


def _violations(needs: Capabilities, facts: TrainerFacts) -> Iterable[str]:
    if facts.num_generations is not None and facts.num_generations < needs.min_group_size:
        yield (
            f"it needs at least {needs.min_group_size} completions per prompt; num_generations is "
            f"{facts.num_generations}. Raise num_generations, or choose an estimator without a "
            "group baseline (GAE)."
        )
    if needs.needs_prepass and facts.can_prepass is False:
        yield (
            "it needs a pass over the window before its losses; the trainer has none. Use a trainer that can replay the "
            "window, or choose an objective without."
        )
    if needs.requires_on_policy:
        if facts.updates_per_rollout is not None and facts.updates_per_rollout > 1:
            yield (
                f"its loss has no ratio, so it allows one update per rollout; there are "
                f"{facts.updates_per_rollout}. Take one update, or choose a loss with a ratio "
                "(ClippedSurrogate)."
            )
        if facts.max_staleness:
            yield (
                f"its loss has no ratio, so samples must come from the current policy; "
                f"max_staleness is {facts.max_staleness}. Set it to 0, or choose a loss with a ratio."
            )
    yield from _off_policy_violations(needs, facts)
    cut = facts.truncation()
    if needs.requires_sampled_distribution and cut and facts.behavior_logprobs != "sampled":
        yield (
            f"its importance ratio is taken against the distribution that sampled, but sampling is "
            f"cut ({cut}) and the log-probabilities are of the uncut one. Sample without the cut, or "
            "choose a loss without an importance ratio (Reinforce)."
        )
    yield from _replay_violations(needs, facts)
    if needs.forbids_normalize_advantages and facts.normalize_advantages:
        yield (
            "it fixes the scale of its advantages, and normalize_advantages would rescale them. "
            "Turn normalize_advantages off."
        )
    if not needs.supports_context_parallel and (facts.context_parallel_size or 1) > 1:
        yield f"it does not support context parallelism; context_parallel_size is {facts.context_parallel_size}."
    if not needs.supports_partial_window and facts.whole_groups_per_window is False:
        yield "it needs all completions of a prompt in one optimizer step. Let windows hold whole prompts."


def _off_policy_violations(needs: Capabilities, facts: TrainerFacts) -> Iterable[str]:
    corrected = "behavior_logprobs" in needs.reads
    if facts.old_logprobs == "behavior" and not needs.requires_on_policy:
        corrected = True
    if corrected:
        return
    sampler = []
    if facts.max_staleness and not needs.requires_on_policy:
        sampler.append(f"samples are up to {facts.max_staleness} rollouts old")
    if facts.temperature is not None and facts.policy_temperature not in (None, facts.temperature):
        sampler.append(
            f"samples are drawn at temperature {facts.temperature} and the policy is trained at "
            f"{facts.policy_temperature}"
        )
    for what in sampler:
        yield (
            f"{what}, and nothing in it reads the sampler's log-probabilities, so it would take them for samples of "
            "the current policy. Add correction=ImportanceCorrection(), take the sampler's log-probabilities for the "
            'old ones (old_logprobs = "behavior"), or choose an objective that reads them (P3O).'
        )


def _replay_violations(needs: Capabilities, facts: TrainerFacts) -> Iterable[str]:
    parallel = facts.context_parallel_size or 1
    if needs.communicates_in_loss and facts.recomputes_loss and parallel > 1:
        yield (
            f"its loss sums over the {parallel} context-parallel ranks, and a recomputed loss would repeat "
            "that exchange in the middle of the backward pass. Leave the loss out of activation "
            "checkpointing."
        )
    if not needs.needs_prepass:
        return
    # The pass before the losses and the one under them must compute the same log-probabilities.
    if facts.dropout:
        yield (
            f"it reads the window's log-probabilities in a pass before the losses, and with dropout = "
            f"{facts.dropout} the two passes would see two different policies. Set every dropout (adapters "
            "included) to 0."
        )
    for effect in facts.forward_side_effects or ():
        yield (
            f"it runs each forward twice, and a forward here also changes {effect}, so the second pass would "
            "not repeat the first. Freeze that state, or choose an objective without a pass before its "
            "losses."
        )


def reads_of(part: Component) -> Iterator[Read]:
    """What a part declares, and what it says in words of the version before."""
    yield from part.declared_reads()
    yield from (read(name) for name in part.required().reads if name in COLUMNS)
    for name in getattr(part, "tolerates", tuple)():
        warnings.warn(
            f"{type(part).__name__}.tolerates: write reads = (read({name!r}, unknown=True),)",
            DeprecationWarning,
            2,
        )
        yield read(name, required=False, unknown=True)


def conflicts_of(part: Component, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterator[str]:
    """What a part says, also in words of the version before."""
    old = len(inspect.signature(part.conflicts).parameters) < 2
    yield from part.conflicts(parts) if old else part.conflicts(parts, facts)  # type: ignore[call-arg]
    violations = getattr(part, "violations", None)
    if old or violations is not None:
        warnings.warn(
            f"{type(part).__name__}: write one method conflicts(self, parts, facts)", DeprecationWarning, 2
        )
    yield from violations(facts) if violations is not None else ()


def lacking(column: Column) -> str:
    """What to say of a column that the trainer does not give."""
    what = column.source or column.meaning or "a column of your own"
    remedy = f"{column.remedy}, or choose" if column.remedy else "Choose"
    return f"it needs {what} ({column.name}); the trainer has none. {remedy} an objective without."


def two_normalisations(estimator: Estimator) -> str:
    """What to say of a trainer that whitens what an estimator finishes in the window."""
    return (
        f"{type(estimator).__name__} finishes its advantages in the window, from {estimator.columns} numbers each, and "
        f"normalize_advantages would whiten them before. Turn normalize_advantages off. To whiten, "
        'give the estimator normalize="window" if it has that option, or choose one that whitens (GDPO).'
    )
