"""A sampler that is on purpose not the trained policy: earlier weights, another temperature."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch.nn.utils import vector_to_parameters

from rlobjectives import GRPO, M2PO, P3O, CapabilityError, ImportanceCorrection, Objective
from rlobjectives.causal_lm import PolicySnapshots
from rlobjectives.causal_lm.scoring import score_sequences
from rlobjectives.integrations.lightning import Experience
from rlobjectives.layouts import PaddedLayout
from tests.causal_lm.policy_runs import BY_LAYER
from tests.causal_lm.small_model import UNEVEN, policy, save_small_model
from tests.causal_lm.snapshot_runs import (
    AGES,
    ROLLOUTS,
    STOP,
    all_strategies,
    fit,
    watched,
    whole_and_resumed,
)
from tests.causal_lm.test_policy import batch_of
from tests.ranks import run_ranks

# Starting ranks costs more than training, so strategies share processes; yet each start stays well below the limit.
GROUPS = (("single",), ("ddp", "fsdp2"), ("zero3",), (BY_LAYER,))
STRATEGIES = tuple(itertools.chain(*GROUPS))
SHARDED = ("fsdp2", "zero3", BY_LAYER)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
pytestmark = [
    pytest.mark.timeout(290),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    """What each rank saw, by strategy; trained on first use."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def group(strategies):
        if strategies == ("single",):
            return [{"single": whole_and_resumed("single", folder, str(root), ranks=1)}]
        return run_ranks(all_strategies, 2, strategies, folder, str(root), timeout=280, fresh=True)

    return lambda strategy: [rank[strategy] for rank in group(next(one for one in GROUPS if strategy in one))]


def scored(folder, weights, seen, temperature=1.0):
    """Log-probabilities of what was sampled, under given weights."""
    model = policy(folder).model.eval()
    with torch.no_grad():
        vector_to_parameters(weights, model.parameters())
        experience = Experience(
            input_ids=seen["ids"], attention_mask=seen["attention"], layout=PaddedLayout(seen["mask"])
        )
        return score_sequences(model, experience, temperature=temperature)[0]


@every_strategy
def test_samples_are_drawn_from_the_weights_of_their_age(ranks, folder, strategy):
    """And their log-probabilities are those of these weights, not of the current ones."""
    for rank in ranks(strategy):
        whole = rank["whole"]
        assert [seen["age"] for seen in whole] == AGES
        for number, seen in enumerate(whole):
            mask = seen["mask"]
            sampler = scored(folder, whole[number - seen["age"]]["weights"], seen)
            torch.testing.assert_close(seen["logprobs"][mask], sampler[mask], rtol=1e-4, atol=1e-5)
            if seen["age"]:
                assert (scored(folder, seen["weights"], seen) - sampler)[mask].abs().max() > 1e-2


@every_strategy
def test_training_goes_on_from_its_own_weights(ranks, strategy):
    for rank in ranks(strategy):
        assert all(seen["restored"] for seen in rank["whole"])
        moved = zip(rank["whole"], rank["whole"][1:], strict=False)
        assert not any(torch.equal(one["weights"], other["weights"]) for one, other in moved)


@every_strategy
def test_a_resumed_run_has_the_behaviour_policy_of_an_uninterrupted_one(ranks, strategy):
    for rank in ranks(strategy):
        assert len(rank["rest"]) == ROLLOUTS - STOP
        for resumed, expected in zip(rank["rest"], rank["whole"][STOP:], strict=True):
            assert resumed["age"] == expected["age"]
            for name in ("ids", "mask", "logprobs", "weights"):
                assert torch.equal(resumed[name], expected[name]), name
        assert torch.equal(rank["resumed end"], rank["end"])


@every_strategy
def test_the_age_and_what_it_costs_are_reported(ranks, strategy):
    for rank in ranks(strategy):
        assert rank["metrics"]["rollout/policy_age"] == AGES[-1]
        assert rank["metrics"]["p3o/ess"] < 0.999


@pytest.mark.parametrize("strategy", SHARDED)
def test_strategies_agree(ranks, strategy):
    for one, expected in zip(ranks(strategy), ranks("ddp"), strict=True):
        assert torch.equal(one["whole"][-1]["ids"], expected["whole"][-1]["ids"])
        # Of the movement as a whole: Adam divides a gradient of nearly zero by itself, so that a single weight's step
        # may hang on the order in which a machine adds.
        moved = expected["end"] - expected["whole"][0]["weights"]
        assert (one["end"] - expected["end"]).norm() < 1e-3 * moved.norm()


def test_a_checkpoint_of_another_sampler_is_refused(folder, tmp_path):
    module = watched(folder)
    path = tmp_path / "one.ckpt"
    fit(module, "single", rollouts=1, root=tmp_path, ranks=1).save_checkpoint(path)
    for snapshots, words in (
        (PolicySnapshots(interval=1, max_staleness=2), "interval = 2"),
        (None, "and this run has none"),
    ):
        with pytest.raises(CapabilityError, match=words):
            fit(
                watched(folder, snapshots=snapshots),
                "single",
                rollouts=2,
                resume=path,
                root=tmp_path,
                ranks=1,
            )


# Temperature.


@pytest.mark.parametrize(("sampler", "trained"), [(1.5, 1.0), (0.7, 1.2)])
def test_behaviour_logprobs_are_those_of_what_was_sampled(folder, sampler, trained):
    module = policy(folder, temperature=sampler, policy_temperature=trained)
    experience = module.rollout(batch_of(UNEVEN))
    mask = experience.layout.mask
    for temperature, found in (
        (trained, module.score(experience)[0]),
        (sampler, experience.behavior_logprobs),
    ):
        expected, _ = score_sequences(module.model, experience, temperature=temperature)
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert (module.score(experience)[0] - experience.behavior_logprobs)[mask].abs().max() > 0.05


def test_importance_weights_correct_for_the_temperature(folder):
    """E over the sampler of the ratio is 1, in each context: what makes the ratio right."""
    module = policy(folder, temperature=1.4, policy_temperature=1.0)
    experience = module.rollout(batch_of(["1+1="] * 64, 64))
    first = experience.layout.mask.int().argmax(1)
    rows = torch.arange(len(first))
    with torch.no_grad():
        log = module.score(experience)[0][rows, first] - experience.behavior_logprobs[rows, first]
    assert float(log.exp().std()) > 0.2
    assert float(log.exp().mean()) == pytest.approx(1.0, abs=4 * float(log.exp().std()) / len(log) ** 0.5)


CORRECTED = (
    {"objective": Objective(estimator=GRPO(), policy_loss=P3O())},
    {"objective": Objective(estimator=GRPO(), correction=ImportanceCorrection())},
    {"objective": Objective(estimator=GRPO(), policy_loss=M2PO()), "old_logprobs": "behavior"},
)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"policy_temperature": 0.8}, r"drawn at temperature 1.0 and the policy is trained at 0.8"),
        ({"snapshots": PolicySnapshots(max_staleness=3)}, "up to 3 rollouts old"),
    ],
)
def test_an_objective_that_does_not_look_at_the_sampler_is_refused(folder, sampler, words):
    for options in ({}, {"objective": Objective.named("reinforce")}):
        if "snapshots" in sampler and options:
            words = "max_staleness is 3"
        with pytest.raises(CapabilityError, match=words):
            policy(folder, **sampler, **options).check_objective()
    for options in CORRECTED:
        policy(folder, **sampler, **options).check_objective()


def test_the_samplers_log_probabilities_can_stand_for_the_old_ones(folder):
    module = policy(folder, **CORRECTED[2])
    experience = module.rollout(batch_of(UNEVEN))
    assert torch.equal(experience.old_logprobs, experience.behavior_logprobs)
    assert module.trainer_facts().old_logprobs == "behavior"
    twice = dataclasses.replace(CORRECTED[1]["objective"], name="twice")
    with pytest.raises(CapabilityError, match="old"):  # one mismatch would be corrected twice
        policy(folder, objective=twice, old_logprobs="behavior").check_objective()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy_temperature": 0.0}, "policy_temperature is 0.0"),
        ({"old_logprobs": "new"}, "old_logprobs is 'new'"),
    ],
)
def test_bad_options_are_named(folder, options, words):
    with pytest.raises(CapabilityError, match=words):
        policy(folder, **options)
