"""CausalLMPolicy on two ranks: sharded weights sample, validate, train and are exported."""

from __future__ import annotations

import math

import pytest
import torch

from tests.causal_lm.policy_runs import BY_LAYER, short_runs
from tests.causal_lm.small_model import save_small_model
from tests.ranks import run_ranks

STRATEGIES = ("zero3", BY_LAYER, "fsdp2", "ddp")
pytestmark = pytest.mark.timeout(290)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(root):
    folder = save_small_model(root / "model")
    return run_ranks(short_runs, 2, STRATEGIES, folder, str(root), timeout=280, fresh=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_and_metrics_are_equal_on_all_ranks(found, strategy):
    first, second = (rank[strategy] for rank in found)
    assert first["history"] == second["history"]
    assert [step for step, _ in first["history"]] == [0, 2]
    assert first["metrics"] == second["metrics"]
    assert all(math.isfinite(value) for value in first["metrics"].values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_weights_were_sharded_where_they_should_be(found, strategy):
    assert found[0][strategy]["sharded"] == {strategy != "ddp"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_untrained_policy_scores_alike_under_every_strategy(found, strategy):
    """Scores before training, greedy and sampled, do not depend on how the weights are sharded or gathered."""
    assert found[0][strategy]["history"][0] == found[0]["ddp"]["history"][0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_agree_between_strategies(found, strategy):
    """Rollouts are drawn alike, so everything measured on them and after them agrees."""
    metrics, expected = found[0][strategy]["metrics"], found[0]["ddp"]["metrics"]
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_exported_model_is_the_trained_one(found, root, strategy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(root / strategy)
    assert len(AutoTokenizer.from_pretrained(root / strategy)) == 18
    start = found[0][strategy]["start"]
    assert len(list(model.parameters())) == len(start)
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), start, strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
