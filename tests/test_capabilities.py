"""Capabilities merge as promised, and a trainer hears of every mismatch at once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rlobjectives import (
    GDPO,
    GRPO,
    Capabilities,
    CapabilityError,
    ClippedSurrogate,
    Estimator,
    KLPenalty,
    Objective,
    Reinforce,
    SequenceMean,
    TokenMean,
    TrainerFacts,
)


def test_flags_merge_by_their_prefix() -> None:
    flags = [one.name for one in fields(Capabilities) if one.name != "min_group_size"]
    for name in flags:
        on, off = Capabilities(**{name: True}), Capabilities(**{name: False})
        expected = not name.startswith("supports_")
        assert getattr(on.merge(off), name) is expected
        assert getattr(off.merge(on), name) is expected
        assert getattr(on.merge(on), name) is True
    assert Capabilities(min_group_size=2).merge(Capabilities(min_group_size=4)).min_group_size == 4
    assert Capabilities().merge(Capabilities()) == Capabilities()


def test_needs_in_words() -> None:
    words = Capabilities(
        reads=frozenset({"values", "returns"}), min_group_size=3, requires_on_policy=True
    ).needs()
    assert words == ("values of a critic", "3+ completions per prompt", "one update per rollout")


VIOLATIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"min_group_size": 2},
        {"num_generations": 1},
        "at least 2 completions per prompt; num_generations is 1",
    ),
    ({"reads": {"values"}}, {"offers": {"values": False}}, "values of a critic"),
    ({"reads": {"ref_logprobs"}}, {"offers": {"ref_logprobs": False}}, "a reference policy"),
    ({"reads": {"teacher_logprobs"}}, {"offers": {"teacher_logprobs": False}}, "a teacher"),
    ({"needs_prepass": True}, {"can_prepass": False}, "a pass over the window before its losses"),
    ({"reads": {"behavior_logprobs"}}, {"behavior_logprobs": "none"}, "the sampler's log-probabilities"),
    ({"requires_on_policy": True}, {"updates_per_rollout": 2}, "one update per rollout; there are 2"),
    ({"requires_on_policy": True}, {"max_staleness": 1}, "max_staleness is 1"),
    ({"requires_sampled_distribution": True}, {"top_p": 0.9}, r"cut \(top_p = 0.9\)"),
    ({"requires_sampled_distribution": True}, {"top_k": 50}, "top_k = 50"),
    (
        {"requires_sampled_distribution": True},
        {"min_p": 0.1, "behavior_logprobs": "untruncated"},
        "min_p = 0.1",
    ),
    ({"forbids_normalize_advantages": True}, {"normalize_advantages": True}, "would rescale"),
    ({"supports_context_parallel": False}, {"context_parallel_size": 2}, "context_parallel_size is 2"),
    ({"supports_partial_window": False}, {"whole_groups_per_window": False}, "one optimizer step"),
]


class Flagged(Estimator):
    """An estimator with whatever capabilities a test wants."""

    def __init__(self, **flags: Any) -> None:
        self.flags = Capabilities(**flags)

    def required(self) -> Capabilities:
        return self.flags

    def estimate(self, rollouts: Any) -> Any:
        return rollouts.rewards[:, 0]


def objective(**flags: Any) -> Objective:
    return Objective(estimator=Flagged(**flags), policy_loss=ClippedSurrogate(), name="test")


@pytest.mark.parametrize(("flags", "facts", "message"), VIOLATIONS)
def test_each_violation(flags: dict[str, Any], facts: dict[str, Any], message: str) -> None:
    with pytest.raises(CapabilityError, match=message) as caught:
        objective(**flags).check(TrainerFacts(**facts))
    assert str(caught.value).startswith("test cannot run here:\n  - it")
    objective(**flags).check(TrainerFacts())  # what is not known is not checked
    # Of two of these the clipped loss says something itself: cut distributions, and samples it takes for current ones.
    if "requires_sampled_distribution" not in flags and "max_staleness" not in facts:
        objective().check(TrainerFacts(**facts))


def test_nothing_is_wrong_with_a_sampler_that_tells_its_distribution() -> None:
    objective().check(TrainerFacts(top_p=0.9, top_k=20, behavior_logprobs="sampled"))
    objective().check(TrainerFacts(top_p=1.0, top_k=0, min_p=0.0, behavior_logprobs="untruncated"))


def test_all_violations_at_once() -> None:
    bad = Objective(estimator=GDPO(weights=(1.0, 2.0, 3.0)), policy_loss=Reinforce(), kl=KLPenalty(coef=0.1))
    facts = TrainerFacts(
        num_generations=1,
        num_rewards=2,
        updates_per_rollout=4,
        max_staleness=2,
        normalize_advantages=True,
        offers={"ref_logprobs": False},
    )
    with pytest.raises(CapabilityError) as caught:
        bad.check(facts)
    message = str(caught.value)
    assert "GDPO cannot run here, for 6 reasons:" in message
    assert message.count("\n  - ") == 6
    assert "GDPO has 3 weights for 2 rewards" in message


def test_the_message_of_the_design() -> None:
    with pytest.raises(
        ValueError, match="Raise num_generations, or choose an estimator without a group baseline"
    ):
        Objective.named("gdpo").check(TrainerFacts(num_generations=1))


def test_an_objective_merges_its_parts() -> None:
    merged = Objective(estimator=GRPO(), policy_loss=Reinforce(), kl=KLPenalty()).capabilities
    assert (merged.min_group_size, merged.requires_on_policy, merged.needs_ref_logprobs) == (2, True, True)
    plain, rich = Objective(estimator=GRPO()), Objective(estimator=GRPO(), kl=KLPenalty(), entropy_coef=0.1)
    assert set(rich.columns()) - set(plain.columns()) == {"ref_logprobs", "entropy"}


@pytest.mark.parametrize("name", ["behavior_logprobs", "old_logprobs"])
def test_facts_in_words_are_checked(name: str) -> None:
    with pytest.raises(CapabilityError, match=f"{name} is 'sample'; expected one of"):
        TrainerFacts(**{name: "sample"})


@pytest.mark.parametrize(
    ("fields_", "message"),
    [
        ({"estimator": TokenMean}, "expected an instance of Estimator"),
        ({"estimator": "grpo"}, "Objective.named builds from names"),
        ({"policy_loss": TokenMean()}, "expected an instance of PolicyLoss"),
        ({"reduction": GRPO()}, "expected an instance of LossReduction"),
        ({"kl": 0.1}, r"expected an instance of TokenTerm or None, such as KLPenalty\(...\)"),
        ({"correction": 1}, "expected an instance of PolicyCorrection or None, such as ImportanceCorrection"),
        ({"entropy_coef": -0.1}, "entropy_coef is -0.1"),
        ({"entropy_coef": float("nan")}, "entropy_coef is nan"),
    ],
)
def test_parts_of_the_wrong_kind(fields_: dict[str, Any], message: str) -> None:
    with pytest.raises(CapabilityError, match=message):
        Objective(**{"estimator": GRPO(), "reduction": SequenceMean(), **fields_})
