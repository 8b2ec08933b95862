"""OPSM: published set, denominators, and partition."""

from __future__ import annotations

import pytest
import torch

from rlobjectives import (
    GDPO,
    OPSM,
    CapabilityError,
    FixedBudget,
    Objective,
    PromptMean,
    Rollouts,
    SequenceMean,
    TokenMean,
)
from tests.corrections.test_importance import fixture
from tests.losses.offpolicy import Data, Given, run, single

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def objective(threshold: float = 0.1, **options) -> Objective:
    denominator = options.pop("denominator", "original")
    against = options.pop("against", "old")
    mask = OPSM(threshold=threshold, denominator=denominator, against=against)
    return Objective(estimator=options.pop("estimator", Given()), off_policy_mask=mask, **options)


def test_published_set():
    """Mean drift is −3.7e−17 and −0.05; only the second sequence has a negative advantage."""
    result = single(objective(-0.1), fixture())
    assert result.metrics["opsm/dropped_fraction"] == pytest.approx(2 / 5)
    plain = single(Objective(estimator=Given()), fixture())
    assert torch.equal(result.gradient[:3], plain.gradient[:3])
    assert torch.equal(result.gradient[3:], torch.zeros(3, dtype=torch.float64))
    assert single(objective(-0.05 + 1e-9), fixture()).metrics["opsm/dropped_fraction"] == 0.0


def test_a_positive_advantage_is_never_dropped():
    data = Data.random([4, 3, 2])
    data.columns["old_logprobs"], data.columns["logprobs"] = (
        data.columns["logprobs"],
        data.columns["logprobs"] - 5.0,
    )
    result = single(objective(0.0), data)
    negative = (data.advantages < 0)[:, None] & data.mask
    assert result.metrics["opsm/dropped_fraction"] == pytest.approx(float(negative.sum() / data.mask.sum()))


def test_against_the_sampler():
    data = Data.random([4, 3, 2])
    data.columns["behavior_logprobs"] = data.columns["logprobs"].clone()
    data.columns["logprobs"] = data.columns["logprobs"] - 5.0
    data.columns["old_logprobs"] = data.columns["logprobs"].clone()
    data.advantages = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    assert single(objective(1.0), data).metrics["opsm/dropped_fraction"] == 0.0
    assert single(objective(1.0, against="behavior"), data).metrics["opsm/dropped_fraction"] == pytest.approx(
        7 / 9
    )


@pytest.mark.parametrize(
    "reduction",
    [TokenMean(), SequenceMean(), SequenceMean(count="nonempty"), FixedBudget(max_tokens=9)],
    ids=str,
)
def test_kept_denominators(reduction):
    data = Data.random([4, 1, 3, 6], seed=2)
    drift = torch.where(data.mask, data.columns["old_logprobs"] - data.columns["logprobs"], 0.0).sum(1)
    dropped = (drift / data.mask.sum(1) > 0.0) & (data.advantages < 0)
    assert dropped.any()
    smaller = Data(data.mask & ~dropped[:, None], data.advantages, data.columns)
    for pieces, others in (
        ([data], [smaller]),
        ([data.rows([0, 2]), data.rows([1, 3])], [smaller.rows([0, 2]), smaller.rows([1, 3])]),
    ):
        found = run(objective(0.0, denominator="kept", reduction=reduction), pieces)
        expected = run(Objective(estimator=Given(), reduction=reduction), others)
        torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
        torch.testing.assert_close(found.gradient, expected.gradient, **CLOSE)


def test_kept_denominators_with_advantages_that_are_final_later():
    data = Data.random([4, 1, 3, 6], seed=2)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    late = objective(0.0, denominator="kept", estimator=GDPO(weights=(1.0, 0.5)))
    data.advantages = late.estimator.estimate(
        Rollouts(rewards=rewards, group_ids=torch.zeros(4, dtype=torch.long))
    )
    whole = single(late, data)
    pieces = run(late, [data.rows([0, 1]), data.rows([2, 3])])
    torch.testing.assert_close(pieces.gradient, whole.gradient, **CLOSE)
    assert whole.metrics["opsm/dropped_fraction"] > 0


def test_packed_and_garbage():
    data = Data.random([4, 1, 3], seed=2)
    clean = single(objective(0.0), data)
    packed = single(objective(0.0), data, packed=True)
    torch.testing.assert_close(packed.gradient, clean.gradient, **CLOSE)
    for garbage in (float("nan"), float("inf"), 1e30):
        columns = {name: torch.where(data.mask, c, garbage) for name, c in data.columns.items()}
        assert torch.equal(
            single(objective(0.0), Data(data.mask, data.advantages, columns)).gradient, clean.gradient
        )


def test_refusals():
    with pytest.raises(CapabilityError, match="PromptMean"):
        objective(denominator="kept", reduction=PromptMean())
    for options in ({"threshold": float("nan")}, {"against": "reference"}, {"denominator": "none"}):
        with pytest.raises(CapabilityError, match=next(iter(options))):
            OPSM(**options)
