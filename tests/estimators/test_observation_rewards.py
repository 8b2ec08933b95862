"""Token rewards at places that are no action: refused, credited to the action before them, or dropped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlobjectives import (
    GAE,
    GRPO,
    CapabilityError,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    ReinforcePlusPlus,
    ReMax,
    Rollouts,
    TDLambda,
    VTrace,
)
from rlobjectives.testing.forbidden import no_host_sync
from tests.estimators.helpers import LAYOUTS, close, rollouts_of, rows_of
from tests.oracles import credit as oracle

READERS: tuple[tuple[type, dict[str, Any]], ...] = (
    *((GAE, {"observations": observations}) for observations in ("skip", "zero_value", "step")),
    *((TDLambda, {"observations": observations}) for observations in ("skip", "zero_value", "step")),
    (TDLambda, {"baseline": "none"}),
    (VTrace, {}),
    (ReinforcePlusPlus, {"normalize": "none"}),
    (ReinforcePlusPlus, {"normalize": "none", "observations": "step"}),
    (ReMax, {}),
    (OptimalTokenBaseline, {"on_singleton": "zero"}),
)
every_reader = pytest.mark.parametrize(("kind", "options"), READERS)
MASK = [[1, 0, 1, 0, 0], [0, 1, 0], [1, 1]]
REWARDS = [[1.0, 2.0, 3.0, 0.5, 0.25], [0.0, 4.0, 8.0], [0.0, 16.0]]
"""On observations: 2 between two actions, 0.5 and 0.25 behind the last, 8 behind the only one."""


def moved(rewards: list[float], mask: list[int]) -> list[float]:
    """Every reward at the last action at or before it."""
    found, last = [0.0] * len(mask), None
    for place, (reward, counted) in enumerate(zip(rewards, mask)):
        last = place if counted else last
        if last is not None:
            found[last] += reward
    return found


def rollouts(mask: Any, rewards: Any, layout: str = "padded", **over: Any) -> Rollouts:
    """Data for any of the readers, without values and sequence rewards of their own."""
    flat = [[-1.0] * len(row) for row in mask]
    zeros = [[0.0] * len(row) for row in mask]
    columns = {
        "token_rewards": rewards,
        "values": zeros,
        "old_logprobs": flat,
        "behavior_logprobs": flat,
        "squared_probs": [[0.5] * len(row) for row in mask],
        "greedy_rewards": [0.0] * len(mask),
        **over,
    }
    return rollouts_of(mask, columns.pop("scores", [0.0] * len(mask)), layout, **columns)


@every_reader
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_by_default(kind: type, options: dict[str, Any], layout: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        kind(**options).estimate(rollouts(MASK, REWARDS, layout))
    message = str(caught.value)
    assert message.startswith("4 token rewards other than 0 stand at places that are no action")
    assert "2 in sequence 0 at position 1" in message
    assert "8 in sequence 1 at position 2" in message
    assert kind.__name__ in message
    assert 'on_observation_reward="credit"' in message


@every_reader
@pytest.mark.parametrize("layout", LAYOUTS)
def test_credited_to_the_last_action_before(kind: type, options: dict[str, Any], layout: str) -> None:
    part = kind(**options, on_observation_reward="credit")
    data = rollouts(MASK, REWARDS, layout)
    with no_host_sync():  # what has to be known was found at the boundary
        found = part.estimate(data)
    expected = rollouts(MASK, [moved(*row) for row in zip(REWARDS, MASK)], layout)
    assert torch.equal(found, kind(**options).estimate(expected))
    assert data.token_rewards is not None
    assert rows_of(data.token_rewards, MASK, layout) == REWARDS  # the input is left alone


@pytest.mark.parametrize("observations", ["skip", "zero_value", "step"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_number(observations: str, layout: str) -> None:
    """Not 4, 0, 3, which loses the observation's 2."""
    data = rollouts([[1, 0, 1]], [[1.0, 2.0, 3.0]], layout)
    for part in (
        GAE(observations=observations, on_observation_reward="credit"),
        TDLambda(trace_decay=1.0, observations=observations, on_observation_reward="credit"),
    ):
        close(rows_of(part.estimate(data), [[1, 0, 1]], layout), [[6.0, 0.0, 3.0]])
        close(rows_of(part.value_targets(data), [[1, 0, 1]], layout), [[6.0, 0.0, 3.0]])


def test_discounted_and_beside_the_reward_of_the_sequence_and_a_shaped_one() -> None:
    data = rollouts(
        [[1, 0, 1]],
        [[1.0, 2.0, 3.0]],
        scores=[5.0],
        values=[[0.5, 9.0, 0.25]],
        ref_logprobs=[[-2.0, math.nan, -1.5]],
    )
    options = {"discount": 0.9, "trace_decay": 0.8, "on_observation_reward": "credit", "kl_coef": 0.1}
    expected = oracle.masked_gae(
        [0.5, 9.0, 0.25], [1, 0, 1], 5.0, 0.9, 0.8, token_rewards=[3.0 - 0.1, 0.0, 3.0 - 0.05]
    )
    close(GAE(**options).estimate(data), [expected[0]])


@every_reader
def test_dropped_on_request(kind: type, options: dict[str, Any]) -> None:
    clean = [[r if m else 0.0 for r, m in zip(*row)] for row in zip(REWARDS, MASK)]
    found = kind(**options, on_observation_reward="drop").estimate(rollouts(MASK, REWARDS))
    assert torch.equal(found, kind(**options).estimate(rollouts(MASK, clean)))


@every_reader
@pytest.mark.parametrize("choice", ["error", "credit", "drop"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_reward(
    kind: type, options: dict[str, Any], choice: str, garbage: float
) -> None:
    mask, part = [[1, 0, 1]], kind(**options, on_observation_reward=choice)
    dirty, clean = (rollouts(mask, [[1.0, one, 3.0]]) for one in (garbage, 0.0))
    assert torch.equal(part.estimate(dirty), part.estimate(clean))
    if choice == "credit":
        mixed, plain = (rollouts([[1, 0, 0, 1]], [[1.0, one, 2.0, 3.0]]) for one in (garbage, 0.0))
        assert torch.equal(part.estimate(mixed), part.estimate(plain))


@every_reader
def test_a_reward_that_no_action_stands_before(kind: type, options: dict[str, Any]) -> None:
    data = rollouts([[0, 1], [1, 0]], [[2.0, 1.0], [0.0, 4.0]])
    credit = {**options, "on_observation_reward": "credit"}
    with pytest.raises(
        CapabilityError, match=r"1 token rewards .* have no action token before them"
    ) as caught:
        kind(**credit).estimate(data)
    assert "2 in sequence 0 at position 0" in str(caught.value)
    lost = kind(**credit, on_lost_reward="drop").estimate(data)
    kept = kind(**options).estimate(rollouts([[0, 1], [1, 0]], [[0.0, 1.0], [4.0, 0.0]]))
    assert torch.equal(lost, kept)


def test_an_observation_that_opens_a_turn_belongs_to_the_turn_before() -> None:
    mask, rewards = [[1, 0], [0, 1], [1]], [[1.0, 0.0], [2.0, 3.0], [7.0]]
    data = rollouts(mask, rewards, session_ids=[5, 5, 6])
    session = GAE(reward_scope="session", on_observation_reward="credit")
    assert rows_of(session.estimate(data), mask) == [[6.0, 0.0], [0.0, 3.0], [7.0]]
    with pytest.raises(CapabilityError, match="no action token before"):
        GAE(reward_scope="session_replicated", on_observation_reward="credit").estimate(data)
    first = rollouts(mask, [[1.0, 0.0], [0.0, 3.0], [7.0]], session_ids=[5, 5, 6])
    assert torch.equal(session.estimate(first)[1:], session.estimate(data)[1:])


def test_a_dummy_repeats_no_reward() -> None:
    """A row that the layout does not count may hold another row's columns under a false mask."""
    mask = torch.tensor([[True, True], [False, False]])
    layout = PaddedLayout(mask, sequence_mask=torch.tensor([True, False]))
    ones = torch.ones(2, 2)
    data = Rollouts(
        rewards=torch.zeros(2), group_ids=torch.tensor([0, 1]), layout=layout, token_rewards=ones, values=ones
    )
    assert not data.misplaced
    assert GAE().estimate(data).tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_every_rank_hears_of_it() -> None:
    """Kept by the window's builder, and raised by freeze."""
    data = rollouts([[1, 0, 1]], [[1.0, 2.0, 3.0]])
    builder = Objective(estimator=GAE()).window()
    estimate = builder.estimate(data)
    assert data.layout is not None
    with builder.guard():
        builder.add(estimate=estimate, layout=data.layout)
    with pytest.raises(CapabilityError, match="token rewards other than 0"):
        builder.freeze()


def test_refusals() -> None:
    for kind, _ in READERS:
        with pytest.raises(CapabilityError, match="on_observation_reward is 'zero'"):
            kind(on_observation_reward="zero")
    GRPO().estimate(rollouts(MASK[:1] * 2, REWARDS[:1] * 2, groups=[0, 0]))  # reads none
