"""Weights of rewards: in order or by name, the same for every estimator that adds rewards up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

import rlobjectives
from rlobjectives import (
    GRPO,
    CapabilityError,
    Estimator,
    MaxRL,
    Objective,
    PaddedLayout,
    PassAtK,
    Rollouts,
    TrainerFacts,
)
from rlobjectives.estimators.weights import RewardWeights
from tests.parts import given_options

WEIGHTED: list[type[Any]] = [
    found
    for name in sorted(rlobjectives.__all__)
    if isinstance(found := getattr(rlobjectives, name), type) and issubclass(found, RewardWeights)
]
NAMED = {"format": 0.5, "correct": 1.0}
every_kind = pytest.mark.parametrize("kind", WEIGHTED)


def rollouts(names: tuple[str, ...] = ("correct", "format")) -> Rollouts:
    rewards = torch.tensor([[1.0, 0.2], [0.0, 0.6], [0.5, 0.0], [1.0, 1.0]], dtype=torch.float64)
    numbers = -torch.linspace(0.1, 1.0, 8).reshape(4, 2)
    names_of = ("values", "old_logprobs", "ref_logprobs", "behavior_logprobs", "squared_probs")
    return Rollouts(
        rewards=rewards,
        greedy_rewards=0.5 * rewards,
        group_ids=torch.tensor([0, 0, 1, 1]),
        layout=PaddedLayout(torch.ones(4, 2, dtype=torch.bool)),
        reward_names=names,
        **dict.fromkeys(names_of, numbers),
    )


def test_every_estimator_with_weights_shares_them() -> None:
    """15 of them, and nobody has weights of rewards that are not these."""
    assert len(WEIGHTED) == 15
    for name in rlobjectives.__all__:
        found = getattr(rlobjectives, name)
        if isinstance(found, type) and issubclass(found, Estimator) and dataclasses.is_dataclass(found):
            own = "weights" in {one.name for one in dataclasses.fields(found)}
            assert own == (found in WEIGHTED or found is rlobjectives.Combined), name


@every_kind
def test_by_name_is_by_position(kind: Any) -> None:
    options = {**given_options(kind), **({"form": "max_minus_second"} if kind is PassAtK else {})}
    named, placed = kind(weights=NAMED, **options), kind(weights=(1.0, 0.5), **options)
    data = rollouts()
    assert named.reward_weights(data.reward_names) == placed.reward_weights(data.reward_names) == (1.0, 0.5)
    assert torch.equal(named.estimate(data), placed.estimate(data))
    assert not torch.equal(named.estimate(data), kind(weights=(0.5, 1.0), **options).estimate(data))


@every_kind
@pytest.mark.parametrize("names", [("correct", "style"), ("correct", "format", "style")])
def test_other_names_are_refused_with_both_lists(kind: Any, names: tuple[str, ...]) -> None:
    estimator = kind(weights=NAMED, **given_options(kind))
    with pytest.raises(CapabilityError, match=r"\['correct', 'format'\]; the rewards are .*'style'\]"):
        estimator.reward_weights(names)
    found = list(estimator.conflicts({}, TrainerFacts(num_rewards=len(names), reward_names=names)))
    assert len(found) == 1
    assert kind.__name__ in found[0]
    assert "the rewards are" in found[0]
    assert not list(estimator.conflicts({}, TrainerFacts(num_rewards=2, reward_names=("format", "correct"))))


@every_kind
def test_another_number_is_refused_at_setup(kind: Any) -> None:
    estimator = kind(weights=(1.0, 0.5), **given_options(kind))
    found = list(estimator.conflicts({}, TrainerFacts(num_rewards=3)))
    assert found == [f"{kind.__name__} has 2 weights for 3 rewards. Give one weight per reward."]
    with pytest.raises(CapabilityError, match=f"{kind.__name__} has 2 weights for 3 rewards"):
        estimator.reward_weights(("a", "b", "c"))
    assert not list(estimator.conflicts({}, TrainerFacts(num_rewards=2)))
    assert not list(kind(**given_options(kind)).conflicts({}, TrainerFacts(num_rewards=3)))


@every_kind
@pytest.mark.parametrize(
    "weights", [{"a": True, "b": 1.0}, {"a": "1", "b": 1.0}, {1: 1.0, 2: 1.0}, (True, 1.0), 1.0]
)
def test_nonsense_is_refused(kind: Any, weights: Any) -> None:
    with pytest.raises(CapabilityError, match="weights"):
        kind(weights=weights, **given_options(kind))


def test_weights_are_a_copy_and_lists_are_tuples() -> None:
    given = dict(NAMED)
    estimator = GRPO(weights=given)
    given["format"] = 9.0
    assert estimator.weights == NAMED
    assert GRPO(weights=[1.0, 0.5]) == GRPO(weights=(1.0, 0.5))
    with pytest.raises(CapabilityError, match="weights"):
        MaxRL(weights={"a": -1.0, "b": 1.0})


@every_kind
@pytest.mark.parametrize("weights", ["{correct: 1.0, format: 0.5}", "[1.0, 0.5]", "null"])
def test_yaml(kind: Any, weights: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Estimator, "estimator")
    text = f"estimator:\n  class_path: rlobjectives.{kind.__name__}\n  init_args:\n    weights: {weights}\n"
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # by release
    built = instantiate(parser.parse_string(text)).estimator
    expected = {"[": (1.0, 0.5), "n": None}.get(weights[0], {"correct": 1.0, "format": 0.5})
    assert built.weights == expected


def test_named_objectives_and_trl() -> None:
    assert Objective.named("grpo", estimator={"weights": NAMED}).estimator.reward_weights(
        ("correct", "format")
    ) == (1.0, 0.5)
    settle = pytest.importorskip("rlobjectives.integrations.trl.objective_source")
    objective = settle.as_objective({"name": "rloo", "estimator": {"weights": NAMED}})
    assert objective.estimator.reward_weights(("correct", "format")) == (1.0, 0.5)
