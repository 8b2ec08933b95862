"""Objectives that look at the window before its losses, under every strategy against one process."""

from __future__ import annotations

import pytest

from tests.integrations.lightning.stale_runs import BUDGET, OBJECTIVES, WINDOWS, plain_updates, train
from tests.integrations.lightning.toy import relative_error
from tests.ranks import run_ranks

STRATEGIES = ("zero3", "ddp")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train, 2, STRATEGIES, timeout=290, fresh=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("windows", [1, WINDOWS])
def test_updates_are_those_of_one_process(ranks, strategy, name, windows):
    found = ranks[0][strategy][f"{name}/{windows}"]
    assert found["steps"] == windows
    assert relative_error(found["weights"], plain_updates(name, windows)) < 1e-6 * windows


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_metrics_say_what_happened(ranks, strategy):
    p3o = ranks[0][strategy]["p3o/1"]["metrics"]
    assert 0.1 < p3o["p3o/ess"] < 0.95
    assert p3o["p3o/ess"] == p3o["p3o/cap"]
    assert 0 < p3o["p3o/capped_fraction"] < 1
    assert {"p3o/behavior_kl", "p3o/adaptive_kl_loss", "policy/ratio_mean", "policy/ratio_max"} <= p3o.keys()
    m2po = ranks[0][strategy]["m2po/1"]["metrics"]
    assert m2po["m2po/second_moment_before"] > 2 * BUDGET
    assert m2po["m2po/second_moment_after"] == pytest.approx(BUDGET, rel=1e-6)
    assert m2po["policy/clip_fraction"] > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_pre_pass_runs_only_where_no_fresh_log_probabilities_are_at_hand(ranks, strategy):
    seen = {name: case["metrics"] for name, case in ranks[0][strategy].items()}
    assert "time/prepass_seconds" not in seen["p3o/1"]  # the trainer has just scored the rollout
    assert "time/prepass_seconds" in seen["p3o/2"]  # the second window's weights have moved
    for name in ("m2po/1", "p3o_old/1"):
        assert "time/prepass_seconds" in seen[name]  # what came with the rollout is of other weights
