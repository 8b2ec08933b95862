"""P3O against its oracle, its golden numbers, and its promises at the extremes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlobjectives import (
    GRPO,
    OPSM,
    P3O,
    CapabilityError,
    ImportanceCorrection,
    KLPenalty,
    MissingColumnError,
    NonFiniteError,
    Objective,
    ReverseKLDistillation,
    TrainerFacts,
)
from rlobjectives.functional import vocabulary_divergence
from rlobjectives.losses import behavior_divergence
from rlobjectives.statistics.distributions import EffectiveSize
from tests.losses.offpolicy import Data, Given, run, single
from tests.oracles import p3o as oracle

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def golden() -> Data:
    """ρ = [1, 2, 0.5, 4] against a behaviour log-probability of −2; one token per sequence."""
    logs = [math.log(r) for r in (1.0, 2.0, 0.5, 4.0)]
    return Data.of(
        [1.0, -1.0, 2.0, -0.5],
        logprobs=[[-2.0 + x] for x in logs],
        behavior_logprobs=[[-2.0]] * 4,
    )


def objective(**options) -> Objective:
    return Objective(estimator=Given(), policy_loss=P3O(**options))


def test_golden_numbers_with_the_epsilon_of_feynrl():
    result = single(objective(epsilon=1e-8, kl_mode="proxy"), golden())
    assert result.metrics["p3o/ess"] == pytest.approx(0.661764705571, abs=1e-12)
    assert result.metrics["policy/ratio_std"] == pytest.approx(
        1.340475661845 * math.sqrt(4 / 3), rel=1e-11
    )  # the quoted one is the population's
    assert float(result.loss) == pytest.approx(0.833279503125, abs=1e-12)
    expected = torch.tensor([-0.661764705571, 0.830882352785, -1.338235294429, 0.584558823607]) / 4
    torch.testing.assert_close(result.gradient, expected.double(), rtol=0, atol=1e-8)


def test_golden_tokens():
    data = golden()
    objective_ = objective(epsilon=1e-8)
    builder = objective_.window()
    layout = data.layout()
    builder.add(estimate=data.advantages, layout=layout)
    builder.add_prepass(data.tokens(layout, data.columns["logprobs"]))
    window = builder.freeze()
    tokens = data.tokens(
        layout, data.columns["logprobs"], advantages=window.advantages(data.advantages, layout)
    )
    loss = objective_.policy_loss.value_and_slope(tokens, window.context("policy_loss"))
    expected = [1.323529411142, -0.799499877796, 2.79693563429, 0.012152844867]
    assert loss.value.flatten().tolist() == pytest.approx(expected, abs=1e-11)
    weights: Any = window.context("policy_loss")["weights"]
    ess = weights.value(1e-8)
    divergence = [0, 0.19314718056, 0.30685281944, 0.63629436112]
    score = [1.323529411142, -0.864829071281, 2.69314718056, -0.20306436571]
    for token, (k, s) in enumerate(zip(divergence, score, strict=True)):
        assert float(loss.value[token]) == pytest.approx(s + (1 - float(ess)) * k, abs=1e-10)


def test_golden_without_epsilon_is_exact():
    assert single(objective(), golden()).metrics["p3o/ess"] == pytest.approx(0.661764705882352941, abs=1e-15)


@pytest.mark.parametrize(("safe", "mode"), [(True, "proxy_safe"), (False, "proxy")])
def test_values_and_slopes_equal_the_oracle(safe, mode):
    data = Data.random([4, 1, 3, 6], spread=0.8)
    result = single(objective(kl_mode=mode), data)
    pairs = [
        (float(x), float(b), float(a), place)
        for place, (x, b, a) in enumerate(
            zip(
                data.columns["logprobs"].flatten(),
                data.columns["behavior_logprobs"].flatten(),
                data.advantages[:, None].expand(data.mask.shape).flatten(),
                strict=True,
            )
        )
        if data.mask.flatten()[place]
    ]
    size = oracle.effective_size([math.exp(x - b) for x, b, *_ in pairs])
    found = {place: oracle.token(x, b, a, size, safe=safe) for x, b, a, place in pairs}
    total = math.fsum(value for value, _ in found.values()) / len(found)
    assert float(result.loss) == pytest.approx(total, rel=1e-12)
    for place, gradient in enumerate(result.gradient.tolist()):
        expected = found[place][1] / len(found) if place in found else 0.0
        assert gradient == pytest.approx(expected, abs=1e-14)


def test_gradient_is_autograd_of_the_formula_with_its_stop_gradients():
    data = Data.random([4, 2, 5])
    result = single(objective(kl_mode="proxy"), data)
    leaf = data.columns["logprobs"].clone().requires_grad_()
    log = (leaf - data.columns["behavior_logprobs"])[data.mask]
    ratio = log.exp().detach()
    size = ratio.sum() ** 2 / (ratio.numel() * (ratio**2).sum())
    advantages = data.advantages[:, None].expand(data.mask.shape)[data.mask]
    score = -torch.minimum(ratio, size) * advantages * leaf[data.mask]
    divergence = log + torch.exp((-log).clamp(-10, 10)) - 1
    (score + (1 - size) * divergence).mean().backward()
    torch.testing.assert_close(result.gradient, leaf.grad.flatten(), **CLOSE)


def test_on_policy_is_the_plain_policy_gradient():
    data = Data.random([3, 5])
    data.columns["behavior_logprobs"] = data.columns["logprobs"].clone()
    result = single(objective(), data)
    assert result.metrics["p3o/ess"] == 1.0
    assert result.metrics["p3o/capped_fraction"] == 0.0
    expected = torch.where(data.mask, -data.advantages[:, None], 0.0) / data.mask.sum()
    torch.testing.assert_close(result.gradient, expected.flatten(), **CLOSE)


@pytest.mark.parametrize("shift", [-500.0, -11.512925464970229, -1.0, 0.75, 500.0])
@pytest.mark.parametrize("scope", ["step", "micro_batch", "sequence"])
def test_a_uniform_shift_leaves_the_effective_sample_size_at_one(shift, scope):
    data = Data.random([3, 5])
    data.columns["logprobs"] = data.columns["logprobs"] - 600.0
    data.columns["behavior_logprobs"] = data.columns["logprobs"] - shift
    assert single(objective(ess_scope=scope), data).metrics["p3o/ess"] == pytest.approx(1.0, abs=1e-12)


def test_feynrl_epsilon_depends_on_the_scale_of_the_ratio():
    data = Data.random([3, 1])
    data.columns["logprobs"] = data.columns["logprobs"] - 12.0
    data.columns["behavior_logprobs"] = data.columns["logprobs"] - math.log(1e-5)
    found = single(objective(epsilon=1e-8), data).metrics["p3o/ess"]
    assert found == pytest.approx(0.038461538462, abs=1e-12)
    two = EffectiveSize.of(torch.full((4,), math.log(2.117), dtype=torch.float64))
    assert float(two.value(1e-8)) == pytest.approx(0.999999999442, abs=1e-12)


@pytest.mark.parametrize("scope", ["step", "micro_batch", "sequence"])
def test_one_dominant_ratio_counts_as_one_sample(scope):
    data = Data.of([1.0], logprobs=[[-1.0, -501.0]], behavior_logprobs=[[-501.0, -501.0]])
    result = single(objective(ess_scope=scope), data)
    assert result.metrics["p3o/ess"] == pytest.approx(0.5, abs=1e-15)
    assert torch.isfinite(result.gradient).all()
    assert math.isfinite(float(result.loss))


@pytest.mark.parametrize("scope", ["step", "micro_batch", "sequence"])
@pytest.mark.parametrize("log_ratio", [-100.0, -50.0, 0.0, 50.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(scope, log_ratio, advantage, dtype):
    data = Data.of(
        [advantage, advantage],
        logprobs=[[-101.0, -1.0, None], [-1.0, -1.0, -1.0]],
        behavior_logprobs=[[-101.0 - log_ratio, -1.2, None], [-1.0, -2.0, -0.5]],
    )
    data.columns = {name: column.to(dtype) for name, column in data.columns.items()}
    result = single(objective(ess_scope=scope), data)
    assert math.isfinite(float(result.loss))
    assert torch.isfinite(result.gradient).all()
    assert all(math.isfinite(number) for number in result.metrics.values())


def test_single_token_has_full_trust():
    data = Data.of([2.0], logprobs=[[-1.0]], behavior_logprobs=[[-1.7]])
    result = single(objective(), data)
    assert result.metrics["p3o/ess"] == 1.0
    torch.testing.assert_close(result.gradient, torch.tensor([-2.0], dtype=torch.float64), **CLOSE)


def test_both_slopes_share_the_value_and_only_the_safe_one_points_back():
    log = torch.tensor([-50.0, -10.5, -10.0, -3.0, 0.0, 2.0, 10.0, 50.0], dtype=torch.float64)
    safe, proxy = behavior_divergence(log), behavior_divergence(log, safe=False)
    torch.testing.assert_close(safe[0], proxy[0], rtol=0, atol=0)
    assert float(safe[0][0]) == pytest.approx(21975.465794806718, rel=1e-14)
    assert float(safe[1][0]) == pytest.approx(-22025.465794806718, rel=1e-14)
    assert proxy[1][:2].tolist() == [1.0, 1.0]
    assert (safe[1][:4] < 0).all()
    assert (safe[1][5:] > 0).all()
    assert float(safe[1].abs().max()) <= math.exp(10)
    for x, slope in zip(log.tolist(), safe[1].tolist(), strict=True):
        assert slope == pytest.approx(oracle.safe_slope(x), abs=1e-10)


def test_micro_batch_scope_depends_on_the_cut_and_step_scope_does_not():
    data, halves = golden(), ([0, 1], [2, 3])
    pieces = [data.rows(index) for index in halves]
    local = [
        single(objective(ess_scope="micro_batch", epsilon=1e-8), piece).metrics["p3o/ess"] for piece in pieces
    ]
    assert local == pytest.approx([0.8999999982, 0.623076922693], abs=1e-12)
    step = run(objective(), pieces)
    whole = single(objective(), data)
    torch.testing.assert_close(step.gradient, whole.gradient, **CLOSE)
    assert step.metrics == pytest.approx(whole.metrics, rel=1e-12)


def test_sequence_scope_gives_each_sequence_its_own():
    data = Data.random([4, 1, 3])
    result = single(objective(ess_scope="sequence"), data)
    expected = torch.zeros_like(data.mask, dtype=torch.float64)
    for row, length in enumerate([4, 1, 3]):
        pairs = [
            (float(data.columns["logprobs"][row, t]), float(data.columns["behavior_logprobs"][row, t]))
            for t in range(length)
        ]
        size = oracle.effective_size([math.exp(x - b) for x, b in pairs])
        for t, (x, b) in enumerate(pairs):
            expected[row, t] = oracle.token(x, b, float(data.advantages[row]), size)[1] / 8
    torch.testing.assert_close(result.gradient, expected.flatten(), **CLOSE)


@pytest.mark.parametrize("scope", ["step", "micro_batch", "sequence"])
def test_packed_equals_padded_and_masked_garbage_changes_nothing(scope):
    data = Data.random([4, 1, 3])
    clean = single(objective(ess_scope=scope), data)
    for garbage in (float("nan"), float("inf"), float("-inf"), 1e30):
        dirty = Data(
            data.mask,
            data.advantages,
            {name: torch.where(data.mask, column, garbage) for name, column in data.columns.items()},
        )
        found = single(objective(ess_scope=scope), dirty)
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.gradient, clean.gradient)
        assert found.metrics == clean.metrics
    packed = single(objective(ess_scope=scope), data, packed=True)
    torch.testing.assert_close(packed.gradient, clean.gradient, **CLOSE)
    assert packed.metrics == pytest.approx(clean.metrics, rel=1e-12)


def test_dummies_change_nothing_and_stay_attached():
    data = Data.random([4, 1, 3])
    plain = single(objective(), data)
    with_dummies = run(objective(), [data.dummy(), data, data.dummy()], counted=[False, True, False])
    torch.testing.assert_close(with_dummies.loss, plain.loss, **CLOSE)
    size = data.mask.shape[1]
    assert torch.equal(with_dummies.gradient[:size], torch.zeros(size, dtype=torch.float64))
    assert with_dummies.metrics == pytest.approx(plain.metrics, rel=1e-12)


def test_a_non_finite_log_probability_is_an_error_before_the_first_loss():
    for name in ("logprobs", "behavior_logprobs"):
        data = Data.random([4, 1, 3])
        data.columns[name][0, 1] = float("nan")
        with pytest.raises(NonFiniteError, match=name):
            single(objective(), data)


def test_no_token_at_all_is_an_empty_window():
    data = Data.random([2, 2])
    data.mask = torch.zeros_like(data.mask)
    builder = objective().window()
    layout = data.layout()
    builder.add(estimate=data.advantages, layout=layout)
    builder.add_prepass(data.tokens(layout, data.columns["logprobs"]))
    window = builder.freeze()
    assert window.empty
    result = single(objective(), data)
    assert float(result.loss) == 0.0
    assert torch.equal(result.gradient, torch.zeros_like(result.gradient))


def test_behaviour_log_probabilities_are_needed():
    data = Data.random([2])
    del data.columns["behavior_logprobs"]
    with pytest.raises(MissingColumnError, match="behavior_logprobs"):
        single(objective(), data)


def test_exact_mode_takes_its_gradient_from_the_divergence_column():
    data = Data.random([3, 2])
    torch.manual_seed(1)
    logits = torch.randn(*data.mask.shape, 5, dtype=torch.float64, requires_grad=True)
    behavior = torch.randn(*data.mask.shape, 5, dtype=torch.float64)
    layout = data.layout()
    column = vocabulary_divergence(logits, behavior, layout)
    exact = objective(kl_mode="exact")
    builder = exact.window()
    builder.add(estimate=data.advantages, layout=layout)
    builder.add_prepass(data.tokens(layout, data.columns["logprobs"]))
    window = builder.freeze()
    leaf = data.columns["logprobs"].clone().requires_grad_()
    tokens = data.tokens(
        layout, leaf, advantages=window.advantages(data.advantages, layout), behavior_kl=column
    )
    window.loss(tokens).loss.backward()
    weights: Any = window.context("policy_loss")["weights"]
    size = float(weights.value())
    reference = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=behavior), torch.distributions.Categorical(logits=logits)
    )[data.mask]
    (expected,) = torch.autograd.grad((1 - size) * reference.sum() / 5, logits)
    torch.testing.assert_close(logits.grad, expected, **CLOSE)
    score = torch.where(
        data.mask,
        -(data.columns["logprobs"] - data.columns["behavior_logprobs"]).exp().clamp_max(size)
        * data.advantages[:, None],
        0.0,
    )
    torch.testing.assert_close(leaf.grad, score / 5, **CLOSE)


def test_entropy_and_reference_penalty_ride_along():
    data = Data.random([3, 2])
    both = Objective(estimator=Given(), policy_loss=P3O(), kl=KLPenalty(coef=0.1), entropy_coef=0.01)
    entropy = torch.rand(data.mask.shape, dtype=torch.float64)
    found = single(both, data, entropy=entropy)
    base = single(objective(), data)
    x = (data.columns["logprobs"] - data.columns["ref_logprobs"])[data.mask]
    extra = 0.1 * (torch.expm1(-x) + x).mean() - 0.01 * entropy[data.mask].mean()
    torch.testing.assert_close(found.loss, base.loss + extra, **CLOSE)


def test_no_number_leaves_the_device(monkeypatch):
    data = Data.random([3, 2])
    layout = data.layout()
    builder = objective().window()
    builder.add(estimate=data.advantages, layout=layout)
    builder.add_prepass(data.tokens(layout, data.columns["logprobs"]))
    window = builder.freeze()
    advantages = window.advantages(data.advantages, layout)
    tokens = data.tokens(layout, data.columns["logprobs"].clone().requires_grad_(), advantages=advantages)

    def refuse(self, *_):
        raise AssertionError("a tensor was read by the host")

    for name in ("__float__", "__bool__", "__int__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    output = window.loss(tokens)
    monkeypatch.undo()
    assert output.loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close(dtype):
    data = Data.random([4, 6, 3])
    exact = single(objective(), data)
    low = Data(data.mask, data.advantages, {k: v.to(dtype) for k, v in data.columns.items()})
    found = single(objective(), low)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found.gradient.double(), exact.gradient, rtol=tolerance, atol=tolerance)


class TestRefusals:
    def test_correction(self):
        with pytest.raises(CapabilityError, match="count the same mismatch twice"):
            Objective(estimator=GRPO(), policy_loss=P3O(), correction=ImportanceCorrection())

    def test_sequence_mask(self):
        with pytest.raises(CapabilityError, match="OPSM on top would count the same mismatch twice"):
            Objective(estimator=GRPO(), policy_loss=P3O(), off_policy_mask=OPSM())

    def test_teacher(self):
        with pytest.raises(CapabilityError, match="nothing balances the two"):
            Objective(estimator=GRPO(), policy_loss=P3O(), distillation=ReverseKLDistillation())

    @pytest.mark.parametrize(
        ("facts", "reason"),
        [
            (TrainerFacts(offers={"values": True}), "values of a critic are fitted to stale samples"),
            (TrainerFacts(importance_correction=True), "count the same mismatch twice"),
            (TrainerFacts(dropout=0.1), "dropout = 0.1"),
            (TrainerFacts(forward_side_effects=("FP8 scaling factors",)), "also changes FP8 scaling factors"),
            (TrainerFacts(top_p=0.9), "top_p = 0.9"),
            (TrainerFacts(top_k=50, behavior_logprobs="untruncated"), "top_k = 50"),
            (TrainerFacts(min_p=0.05), "min_p = 0.05"),
            (TrainerFacts(behavior_logprobs="none"), "the sampler's log-probabilities"),
            (TrainerFacts(can_prepass=False), "a pass over the window before its losses"),
        ],
    )
    def test_trainer(self, facts, reason):
        with pytest.raises(CapabilityError, match=reason):
            Objective.named("p3o").check(facts)

    def test_all_at_once(self):
        with pytest.raises(CapabilityError, match="for 3 reasons"):
            Objective.named("p3o").check(TrainerFacts(dropout=0.1, offers={"values": True}, top_p=0.5))

    def test_recomputed_loss_only_where_the_loss_communicates(self):
        facts = TrainerFacts(recomputes_loss=True, context_parallel_size=2)
        Objective.named("p3o").check(facts)
        with pytest.raises(CapabilityError, match="recomputed loss would repeat that exchange"):
            Objective.named("p3o", policy_loss={"ess_scope": "sequence"}).check(facts)

    def test_renormalised_truncation_and_plain_settings_pass(self):
        Objective.named("p3o").check(
            TrainerFacts(
                top_p=0.9,
                behavior_logprobs="sampled",
                dropout=0.0,
                can_prepass=True,
                offers={"values": False},
            )
        )

    @pytest.mark.parametrize(
        "options",
        [{"ess_scope": "window"}, {"kl_mode": "k3"}, {"epsilon": -1.0}, {"exponent_clamp": 0.0}],
    )
    def test_options(self, options):
        with pytest.raises(CapabilityError, match=next(iter(options))):
            P3O(**options)
