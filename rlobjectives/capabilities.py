"""What a part needs, forbids and supports, checked once against what the trainer offers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from rlobjectives.checks import check_choice, shown
from rlobjectives.errors import CapabilityError
from rlobjectives.options import check_fields, option

__all__ = ["Capabilities", "TrainerFacts", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declared once on each part and merged by `Objective`.

    Needs, requirements and prohibitions merge by *or*, support by *and*, minima by *max*.

    Attributes:
        needs_critic: Reads values of a critic.
        needs_prepass: Reads the whole window's log-probabilities before the first loss.
        needs_behavior_logprobs: Reads the sampler's log-probabilities.
        needs_ref_logprobs: Reads a frozen reference policy's log-probabilities.
        needs_teacher: Reads a teacher's log-probabilities.
        uses_reward_components: Looks at each reward by itself, not at their sum.
        min_group_size: Completions per prompt it needs at least.
        requires_on_policy: One update a rollout, no staleness: there is no ratio to correct with.
        requires_sampled_distribution: Its ratio is taken against the distribution that sampled, so
            truncated sampling needs log-probabilities of the truncated distribution.
        forbids_normalize_advantages: A second normalisation would change the objective.
        communicates_in_loss: Its loss itself sums over the context-parallel ranks, so a loss that is computed
            again in the backward pass would repeat that exchange.
        depends_on_cut: Another cut of the window into micro-batches gives another loss, on purpose.
        supports_context_parallel: Works when a sequence's tokens lie on several ranks.
        supports_partial_window: Works when a prompt's completions fall into different windows.

    Example:
        >>> Capabilities(min_group_size=2).merge(Capabilities(needs_critic=True)).min_group_size
        2
    """

    needs_critic: bool = False
    needs_prepass: bool = False
    needs_behavior_logprobs: bool = False
    needs_ref_logprobs: bool = False
    needs_teacher: bool = False
    uses_reward_components: bool = False
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
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name.startswith("min_"):
                merged[field.name] = max(mine, theirs)
            elif field.name.startswith("supports_"):
                merged[field.name] = mine and theirs
            else:
                merged[field.name] = mine or theirs
        return Capabilities(**merged)  # type: ignore[arg-type]

    def needs(self) -> tuple[str, ...]:
        """The flags that ask something of the trainer, in words, for tables."""
        words = [
            field.name.removeprefix("needs_").replace("_", " ")
            for field in fields(self)
            if field.name.startswith("needs_") and getattr(self, field.name)
        ]
        if self.min_group_size > 1:
            words.append(f"{self.min_group_size}+ completions a prompt")
        if self.requires_on_policy:
            words.append("one update a rollout")
        return tuple(words)


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
        has_critic: Values are available.
        has_reference: Reference log-probabilities are available.
        has_teacher: Teacher log-probabilities are available.
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
    has_critic: bool | None = None
    has_reference: bool | None = None
    has_teacher: bool | None = None
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
    columns = (
        ("needs_critic", facts.has_critic, "values of a critic", "Add a critic"),
        (
            "needs_ref_logprobs",
            facts.has_reference,
            "a reference policy",
            "Keep a frozen reference",
        ),
        ("needs_teacher", facts.has_teacher, "a teacher", "Give a teacher"),
        (
            "needs_prepass",
            facts.can_prepass,
            "a pass over the window before its losses",
            "Use a trainer that can replay the window",
        ),
        (
            "needs_behavior_logprobs",
            None if facts.behavior_logprobs is None else facts.behavior_logprobs != "none",
            "the sampler's log-probabilities",
            "Let the sampler return log-probabilities",
        ),
    )
    for flag, there, what, remedy in columns:
        if getattr(needs, flag) and there is False:
            yield f"it needs {what}; the trainer has none. {remedy}, or choose an objective without."
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
    corrected = needs.needs_behavior_logprobs
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
