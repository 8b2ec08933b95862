"""Policy snapshots: ages, weights inside and after, and a resumed run that samples like an uninterrupted one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from rlobjectives import CapabilityError, WindowError
from rlobjectives.integrations.snapshots import SNAPSHOT_METRICS, PolicySnapshots, local_weights


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def train(module: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.full_like(parameter, float(step + 1)))


def sampled(module: nn.Module, snapshots: PolicySnapshots, steps: range) -> list[tuple[int, float]]:
    """Age and weight inside each rollout, one update after each."""
    seen = []
    for step in steps:
        with snapshots.acting(module):
            seen.append((snapshots.age, float(module[0].weight.detach()[0, 0])))
        train(module, step)
    return seen


@pytest.mark.parametrize(
    ("interval", "staleness", "ages"),
    [
        (1, 0, [0, 0, 0, 0, 0, 0]),
        (1, 1, [0, 1, 1, 1, 1, 1]),
        (1, 3, [0, 1, 2, 3, 3, 3]),
        (2, 3, [0, 1, 2, 3, 2, 3]),
        (3, 2, [0, 1, 2, 0, 1, 2]),
        (4, 3, [0, 1, 2, 3, 0, 1]),
    ],
)
def test_ages_and_weights(interval, staleness, ages):
    module, snapshots = policy(), PolicySnapshots(interval=interval, max_staleness=staleness)
    train(module, -1)  # weight 0 before the first rollout
    seen = sampled(module, snapshots, range(6))
    assert [age for age, _ in seen] == ages
    assert [weight for _, weight in seen] == [float(step - age) for step, age in enumerate(ages)]
    assert float(module[0].weight.detach()[0, 0]) == 6.0
    report: dict[str, Any] = snapshots.metrics()
    assert report.keys() == SNAPSHOT_METRICS.keys()
    assert float(report["rollout/policy_age"].value) == ages[-1]


def test_the_policy_gets_its_own_weights_back_after_an_error():
    module, snapshots = policy(), PolicySnapshots(max_staleness=2)
    sampled(module, snapshots, range(2))
    before = {name: weight.clone() for name, weight in local_weights(module).items()}

    def fail() -> None:
        with snapshots.acting(module):
            assert not torch.equal(local_weights(module)["0.weight"], before["0.weight"])
            raise KeyError("a rollout failed")

    with pytest.raises(KeyError):
        fail()
    for name, weight in local_weights(module).items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.parametrize(("interval", "staleness"), [(1, 2), (2, 3)])
def test_a_resumed_run_samples_like_an_uninterrupted_one(stop, interval, staleness):
    module = policy()
    whole = sampled(module, PolicySnapshots(interval=interval, max_staleness=staleness), range(8))
    module = policy()
    first = PolicySnapshots(interval=interval, max_staleness=staleness)
    seen = sampled(module, first, range(stop))
    file = io.BytesIO()
    torch.save({"snapshots": first.state_dict(), "module": module.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, second = policy(), PolicySnapshots(interval=interval, max_staleness=staleness)
    resumed.load_state_dict(saved["module"])
    second.load_state_dict(saved["snapshots"])
    assert seen + sampled(resumed, second, range(stop, 8)) == whole


def test_refusals():
    with pytest.raises(CapabilityError, match="Raise max_staleness to at least 3"):
        PolicySnapshots(interval=4, max_staleness=2)
    for options in ({"interval": 0}, {"max_staleness": -1}, {"max_staleness": True}):
        with pytest.raises(CapabilityError):
            PolicySnapshots(**options)
    one, other = PolicySnapshots(max_staleness=1), PolicySnapshots(max_staleness=2)
    with pytest.raises(CapabilityError, match="max_staleness = 1"):
        other.load_state_dict(one.state_dict())
    sampled(policy(), one, range(1))
    with pytest.raises(WindowError, match="same weights"), one.acting(nn.Linear(3, 3)):
        pass
