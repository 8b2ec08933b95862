"""The critic under every strategy: the same first update, a policy that rests, and resumed runs."""

import functools
import itertools

import pytest
import torch

from tests.integrations.lightning.runs import uneven
from tests.integrations.lightning.toy import joined
from tests.integrations.lightning.toy_critic import all_cases, cut_off, initial_agent, plain_agent_update
from tests.ranks import run_ranks

GROUPS = (("ddp", "fsdp2"), ("zero2", "zero3"))
STRATEGIES = tuple(itertools.chain(*GROUPS))
STATEFUL = ("single", "ddp", "fsdp2", "zero3")
pytestmark = pytest.mark.timeout(390)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the first rank saw, by strategy; trained on first use."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))

    @functools.cache
    def group(strategies):
        if strategies == ("single",):
            return all_cases(strategies, folder)
        return run_ranks(all_cases, 2, strategies, folder, timeout=380, fresh=True)[0]

    groups = (("single",), *GROUPS)
    return lambda strategy: group(next(one for one in groups if strategy in one))[strategy]


def relative_error(found, expected, start):
    """Largest difference of two updates, relative to the largest weight change."""
    return float((found - expected).abs().max() / (expected - start).abs().max())


def data(strategy):
    return uneven(None, 0) if strategy == "single" else joined([uneven(0, 0), uneven(1, 0)])


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
@pytest.mark.parametrize("weights", ["policy", "critic"])
def test_the_first_update_is_that_of_one_process(found, strategy, weights):
    expected = plain_agent_update(data(strategy))[weights]
    start = initial_agent()[weights]
    step = found(strategy)["first"]["trace"][0]
    assert (expected - start).abs().max() > 0.1
    assert relative_error(step[weights], expected, start) < 1e-6


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_truncated_sequences_go_on_with_the_critics_value(found, strategy):
    places = [(None, 0)] if strategy == "single" else [(0, 0), (1, 0)]
    parts = [cut_off(*place) for place in places]
    expected = plain_agent_update(parts[0] if strategy == "single" else joined(parts))
    ended, step = (found(strategy)[case]["trace"][0] for case in ("first", "cut off"))
    for weights in ("policy", "critic"):
        assert relative_error(step[weights], expected[weights], initial_agent()[weights]) < 1e-6
        assert not torch.equal(step[weights], ended[weights])


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_explained_variance_counts_every_token_of_every_rank_once(found, strategy):
    metrics = found(strategy)["first"]["trace"][0]["metrics"]
    expected = float(plain_agent_update(data(strategy))["explained"])
    assert metrics["value/explained_variance"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_extra_passes_train_the_critic_alone(found, strategy):
    """The policy ends where it would have ended without them, and clipping sees the critic's gradient only."""
    plain, extra = (found(strategy)[case]["trace"][0] for case in ("first", "more for the critic"))
    assert torch.equal(plain["policy"], extra["policy"])
    assert not torch.equal(plain["critic"], extra["critic"])
    assert (plain["steps"], extra["steps"]) == (1, 2)
    assert plain["metrics"]["optim/grad_norm"] == extra["metrics"]["optim/grad_norm"]
    assert "optim/critic_grad_norm" not in plain["metrics"]


def test_extra_passes_agree_between_strategies(found):
    """Not what is left of the policy's last gradient, which ZeRO-3 keeps in a buffer: the critic's gradient alone."""
    first, *others = (found(one)["more for the critic"]["trace"][0] for one in STRATEGIES)
    for other in others:
        torch.testing.assert_close(other["critic"], first["critic"], rtol=1e-5, atol=1e-5)
        norm = first["metrics"]["optim/critic_grad_norm"]
        assert other["metrics"]["optim/critic_grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("strategy", STATEFUL)
def test_the_policy_rests_to_the_last_bit_while_the_critic_warms_up(found, strategy):
    """Neither weights nor state, weight decay included; then it moves, from the right step on."""
    first, second, *_ = found(strategy)["whole"]["trace"]
    start = initial_agent()
    assert (first["steps"], second["steps"]) == (2, 4)
    assert torch.equal(first["policy"], start["policy"])
    assert not torch.equal(first["critic"], start["critic"])
    assert first["critic_state"].any()
    assert not first["policy_state"].any()
    # The third step was the warm-up's last, the fourth the critic's own pass over the second rollout.
    assert torch.equal(second["policy"], start["policy"])
    assert torch.equal(second["policy_state"], first["policy_state"])
    third = found(strategy)["whole"]["trace"][2]
    assert not torch.equal(third["policy"], start["policy"])
    assert third["policy_state"].any()


@pytest.mark.parametrize("strategy", STATEFUL)
def test_a_resumed_run_takes_the_steps_of_an_uninterrupted_one(found, strategy):
    whole, rest = found(strategy)["whole"]["trace"], found(strategy)["rest"]["trace"]
    assert [step["steps"] for step in whole] == [2, 4, 6, 8]
    assert [step["steps"] for step in rest] == [6, 8]
    for expected, resumed in zip(whole[2:], rest, strict=True):
        for name in ("policy", "critic", "policy_state", "critic_state"):
            assert torch.equal(expected[name], resumed[name]), name
        assert expected["scheduler"] == resumed["scheduler"]


@pytest.mark.parametrize("strategy", STATEFUL)
def test_a_head_that_stays_where_it_was_is_told_once(found, strategy):
    assert found(strategy)["whole"]["told"] == []
    (warning,) = found(strategy)["still"]["told"]
    assert "has not moved in 5 optimizer steps" in warning
    assert "a learning rate of 0" in warning
    (warning,) = found(strategy)["decayed"]["told"]
    assert "has had no gradient in 5 optimizer steps" in warning
