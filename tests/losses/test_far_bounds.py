"""Bounds that lie beyond e^±20, where a ratio is held before ``exp``, act like any other: in every part that has one."""

from __future__ import annotations

import math

import pytest
import torch

from rlobjectives import (
    CISPO,
    DPPO,
    GSPO,
    M2PO,
    ClippedSurrogate,
    DecoupledClip,
    GSPOToken,
    ImportanceCorrection,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    Reinforce,
    Rejection,
    Rollouts,
    VTrace,
)
from rlobjectives.functional import kl_estimate
from tests.losses.offpolicy import Data, Given, single

FAR = 1e9  # e^20.7
TINY = 1e-10  # e^−23


def stale(drift: float, advantage: float = 1.0) -> Data:
    """One token that the policy has drifted from (up or down), and one that it has not, in a sequence each."""
    now, then = (-1.0, -1.0 - drift) if drift > 0 else (-1.0 + drift, -1.0)
    return Data.of(
        [advantage, advantage],
        logprobs=[[now], [-2.0]],
        old_logprobs=[[then], [-2.0]],
        behavior_logprobs=[[then], [-2.0]],
    )


def slope(part: object, data: Data) -> float:
    """Derivative of the loss in the drifted token, of two that count; per advantage."""
    found = single(Objective(estimator=Given(), policy_loss=part), data)
    return -2.0 * found.gradient.flatten()[0].item() / data.advantages[0].item()


def value(part: object, data: Data) -> float:
    """Loss of the drifted token per advantage, where the other token's is 1."""
    found = single(Objective(estimator=Given(), policy_loss=part), data)
    return -2.0 * found.loss.item() / data.advantages[0].item() - 1.0


class TestCorrection:
    """The sampler is the one that drifted: log-weights of ±30."""

    def weights(self, log: float, **options: object) -> tuple[float, bool]:
        now, then = (-1.0, -1.0 - log) if log > 0 else (-1.0 + log, -1.0)
        data = Data.of([1.0], logprobs=[[now]], old_logprobs=[[now]], behavior_logprobs=[[then]])
        found = single(Objective(estimator=Given(), correction=ImportanceCorrection(**options)), data)
        return -found.gradient.item(), found.metrics["correction/dropped_fraction"] == 1.0

    @pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
    def test_bounds(self, weight: str) -> None:
        assert self.weights(-30.0, veto=TINY, weight=weight) == (0.0, True)
        assert self.weights(30.0, outside="mask", high=FAR, weight=weight) == (0.0, True)
        assert self.weights(-30.0, outside="mask", low=TINY, weight=weight) == (0.0, True)
        assert self.weights(30.0, high=FAR, weight=weight)[0] == pytest.approx(FAR, rel=1e-12)
        assert self.weights(-30.0, low=TINY, weight=weight)[0] == pytest.approx(TINY, rel=1e-12)
        inside, dropped = self.weights(20.5, high=FAR, weight=weight)
        assert inside == pytest.approx(math.exp(20.5), rel=1e-12)
        assert dropped is False
        # Without a bound the weight is held at e^±20, as ever.
        assert self.weights(30.0, high=None, weight=weight)[0] == pytest.approx(math.exp(20.0), rel=1e-12)

    @pytest.mark.parametrize("over", ["token", "sum", "mean", "max"])
    def test_rejections(self, over: str) -> None:
        for log, test in (
            (30.0, {"high": FAR}),
            (-30.0, {"low": TINY}),
            (30.0, {"high": FAR, "measure": "k3"}),  # e³⁰ − 31
            (-30.0, {"high": 25.0, "measure": "k3"}),  # e⁻³⁰ + 29
            (30.0, {"high": 449.0, "measure": "k2"}),
        ):
            reject = (Rejection(over=over, **test),)
            assert self.weights(log, weight="none", reject=reject) == (0.0, True), test
        for log, test in (
            (20.5, {"high": FAR}),
            (-20.5, {"low": TINY}),
            (20.5, {"high": FAR, "measure": "k3"}),
            (-24.0, {"high": 25.0, "measure": "k3"}),
        ):
            reject = (Rejection(over=over, **test),)
            assert self.weights(log, weight="none", reject=reject)[1] is False, test


@pytest.mark.parametrize(
    "part",
    [
        CISPO(bounds="upper", ratio_cap=FAR),
        CISPO(bounds="two_sided", clip_high=FAR - 1.0),
        CISPO(bounds="sign", clip_high=FAR - 1.0),
        DPPO(clip_low=1.0, ratio_cap=FAR),
        Reinforce(weight="token", weight_cap=FAR),
        Reinforce(weight="sequence", weight_cap=FAR),
    ],
    ids=repr,
)
def test_a_cap_on_a_weight(part: object) -> None:
    assert slope(part, stale(30.0)) == pytest.approx(FAR, rel=1e-9)
    assert slope(part, stale(20.5)) == pytest.approx(math.exp(20.5), rel=1e-9)


def test_a_lower_bound_on_a_weight() -> None:
    lower = 1.0 - (1.0 - TINY)
    for part, advantage in (
        (CISPO(clip_low=1.0 - TINY), 1.0),
        (CISPO(bounds="sign", clip_low=1.0 - TINY), -1.0),
    ):
        assert slope(part, stale(-30.0, advantage)) == pytest.approx(lower, rel=1e-12)


def test_the_weight_of_decoupled_clip() -> None:
    def one(log: float, **options: object) -> float:
        now, then = -1.0, -1.0 - log
        data = Data.of([1.0], logprobs=[[now]], old_logprobs=[[now]], behavior_logprobs=[[then]])
        part = DecoupledClip(behavior_cap=FAR, **options)
        return -single(Objective(estimator=Given(), policy_loss=part), data).gradient.item()

    assert one(30.0) == pytest.approx(FAR, rel=1e-12)
    assert one(30.0, over_cap="mask") == 0.0
    assert one(20.5, over_cap="mask") == pytest.approx(math.exp(20.5), rel=1e-12)
    # A clamp of one's own is the tighter bound on the weight, and hides nobody from the test.
    assert one(30.0, log_ratio_clamp=2.0) == pytest.approx(math.exp(2.0), rel=1e-12)
    assert one(30.0, log_ratio_clamp=2.0, over_cap="mask") == 0.0


@pytest.mark.parametrize("kind", [ClippedSurrogate, DecoupledClip, GSPO, GSPOToken])
def test_a_clip_of_the_surrogate(kind: type) -> None:
    part = kind(clip_low=1.0 - TINY, clip_high=FAR - 1.0)
    up, down = stale(30.0), stale(-30.0, -1.0)
    for data in (up, down):  # the drift as it is, and none against the sampler
        data.columns["behavior_logprobs"] = data.columns["old_logprobs"]
    assert value(part, up) == pytest.approx(FAR, rel=1e-9)
    assert slope(part, up) == 0.0
    assert slope(part, stale(20.5)) == pytest.approx(math.exp(20.5), rel=1e-9)
    found = single(Objective(estimator=Given(), policy_loss=part), up)
    assert found.metrics["policy/clip_high_fraction"] == 0.5
    found = single(Objective(estimator=Given(), policy_loss=part), down)
    assert found.metrics["policy/clip_low_fraction"] == 0.5
    assert slope(part, down) == 0.0


@pytest.mark.parametrize("option", ["dual_clip", "ratio_cap"])
def test_the_other_bounds_of_the_surrogate(option: str) -> None:
    part, data = ClippedSurrogate(**{option: FAR}), stale(30.0, -1.0)
    assert value(part, data) == pytest.approx(FAR, rel=1e-9)
    assert slope(part, data) == 0.0
    assert slope(part, stale(20.5, -1.0)) == pytest.approx(math.exp(20.5), rel=1e-9)
    found = single(Objective(estimator=Given(), policy_loss=part), data)
    assert found.metrics["policy/dual_clip_fraction"] == 0.5


def test_the_floor_of_m2po() -> None:
    part = M2PO(floor_high=FAR - 1.0, budget=1e-4)
    assert value(part, stale(30.0)) == pytest.approx(FAR, rel=1e-9)
    assert slope(part, stale(30.0)) == 0.0
    assert slope(part, stale(20.5)) == pytest.approx(math.exp(20.5), rel=1e-9)


def test_the_bound_on_an_estimated_divergence() -> None:
    found, pull = kl_estimate(torch.tensor([-30.0, -20.5], dtype=torch.float64), "k3", output_clamp=FAR)
    assert found.tolist() == [FAR, pytest.approx(math.exp(20.5) - 21.5, rel=1e-12)]
    assert pull.tolist() == [0.0, pytest.approx(1.0 - math.exp(20.5), rel=1e-12)]


def test_the_ratios_of_estimators() -> None:
    layout = PaddedLayout(torch.tensor([[True], [True]]))
    old = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)
    data = {
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([0, 0]),
        "layout": layout,
        "old_logprobs": old,
        "behavior_logprobs": torch.tensor([[-31.0], [-1.0]], dtype=torch.float64),
    }
    values = torch.zeros(2, 1, dtype=torch.float64)
    found = VTrace(rho_clip=FAR, policy_rho_clip=FAR).credit(Rollouts(**data, values=values))
    assert found.advantages[0].item() == found.returns[0].item() == pytest.approx(FAR, rel=1e-12)
    squared = torch.full((2, 1), 0.5, dtype=torch.float64)
    part = OptimalTokenBaseline(importance_clip=FAR, baseline_epsilon=0.0)
    weights = FAR**2, 1.0
    baseline = weights[0] / sum(weights)
    assert part.estimate(Rollouts(**data, squared_probs=squared)).flatten().tolist() == pytest.approx(
        [1.0 - baseline, -baseline], rel=1e-6
    )
