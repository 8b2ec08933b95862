"""Losses and gradients against the functions of verl, TRL and Liger themselves, on random inputs.

Where a convention differs on purpose, a test states the difference.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    SAPO,
    VESPO,
    ClippedSurrogate,
    EntropyMask,
    FixedBudget,
    GSPOToken,
    KLCov,
    KLPenalty,
    LossReduction,
    Objective,
    PaddedLayout,
    PolicyLoss,
    Reinforce,
    SequenceMean,
    SequenceSum,
    TokenBatch,
    TokenMean,
)
from rlobjectives.functional import kl_estimate
from tests.peers import liger_loss, trl_loss, verl_config, verl_losses

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the peers, while they import
    pytest.mark.slow,
]

MASK = torch.arange(9) < torch.tensor([9, 1, 5, 7, 3, 2]).unsqueeze(1)


def columns(seed: int = 0, spread: float = 0.3, advantage_scale: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    base = -3 * torch.rand(MASK.shape, dtype=torch.float64) - 0.05
    names = ("logprobs", "old_logprobs", "ref_logprobs", "behavior_logprobs")
    found = {n: (base + spread * torch.randn_like(base)).clamp_max(-1e-3) for n in names}
    found["advantages"] = advantage_scale * torch.randn(MASK.shape[0], dtype=torch.float64)
    found["entropy"] = torch.rand_like(base)
    return found


def ours(
    part: PolicyLoss, reduction: LossReduction, data: dict[str, Tensor], **options: Any
) -> tuple[float, Tensor]:
    layout = PaddedLayout(MASK)
    objective = Objective(estimator=GRPO(), policy_loss=part, reduction=reduction, **options)
    leaf = data["logprobs"].clone().requires_grad_()
    builder = objective.window()
    builder.add(estimate=data["advantages"], layout=layout)
    tokens = TokenBatch(
        layout=layout,
        logprobs=leaf,
        advantages=layout.expand(data["advantages"]),
        **{n: data[n] for n in ("old_logprobs", "ref_logprobs", "behavior_logprobs", "entropy")},
    )
    if objective.capabilities.needs_prepass:
        builder.add_prepass(tokens)
    loss = builder.freeze().loss(tokens).loss
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


def theirs(loss_of: Callable[[dict[str, Tensor]], Tensor], data: dict[str, Tensor]) -> tuple[float, Tensor]:
    leaf = data["logprobs"].clone().requires_grad_()
    loss = loss_of({**data, "logprobs": leaf})
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


def compare(one: tuple[float, Tensor], two: tuple[float, Tensor], tolerance: float = 1e-10) -> None:
    assert one[0] == pytest.approx(two[0], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(one[1], two[1], rtol=tolerance, atol=tolerance)


# --- verl ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verl:
    function: str
    part: PolicyLoss
    mode: str
    options: dict[str, Any]
    tolerance: float = 1e-10


MODES: dict[str, LossReduction] = {
    "token-mean": TokenMean(),
    "seq-mean-token-mean": SequenceMean(count="nonempty"),
    "seq-mean-token-sum": SequenceSum(count="nonempty"),
    "seq-mean-token-sum-norm": FixedBudget(max_tokens=MASK.shape[1]),  # its divisor is the padded width
}
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
VERL = {
    **{
        f"vanilla {mode}": Verl(
            "vanilla",
            ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
            mode,
            {**CLIP, "clip_ratio_c": 3.0},
            1e-7,  # its sequence means divide by T + 1e-8
        )
        for mode in MODES
    },
    "cispo": Verl("cispo", CISPO(clip_low=0.2, clip_high=0.28), "token-mean", CLIP),
    "gspo is gspo-token": Verl(
        "gspo",
        GSPOToken(clip_low=0.05, clip_high=0.1),
        "token-mean",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    ),
    "sapo": Verl("sapo", SAPO(), "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}, 1e-7),
    "gmpo": Verl(
        "geo_mean",
        GMPO(clip_low=0.2, clip_high=0.3),
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
        1e-7,
    ),
    "dppo tv": Verl(
        "dppo_tv",
        DPPO(clip_low=0.05, clip_high=0.1),
        "token-mean",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0},
    ),
    "dppo kl": Verl(
        "dppo_kl",
        DPPO(divergence="kl", clip_low=0.02, clip_high=0.03, ratio_cap=1.2),
        "token-mean",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.2},
    ),
}


def verl_loss(case: Verl, data: dict[str, Tensor]) -> Tensor:
    algorithms = verl_losses()
    config = verl_config(**case.options)
    loss: Tensor = algorithms.get_policy_loss_fn(case.function)(
        old_log_prob=data["old_logprobs"],
        log_prob=data["logprobs"],
        advantages=data["advantages"].unsqueeze(1).expand(MASK.shape),
        response_mask=MASK.double(),
        loss_agg_mode=case.mode,
        config=config,
    )[0]
    return loss


@pytest.mark.parametrize("name", VERL)
@pytest.mark.parametrize("seed", [0, 1])
def test_verl(name: str, seed: int) -> None:
    case = VERL[name]
    verl_losses()
    data = columns(seed)
    compare(
        ours(case.part, MODES[case.mode], data), theirs(lambda d: verl_loss(case, d), data), case.tolerance
    )


def configured_verl_loss(name: str, **options: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """One of verl's losses that takes its options from a configuration."""
    function = getattr(verl_losses(), name)
    config = types.SimpleNamespace(policy_loss=types.SimpleNamespace(**options), global_batch_info={})

    def loss_of(data: dict[str, Tensor]) -> Tensor:
        advantages = data["advantages"].unsqueeze(1).expand(MASK.shape)
        loss: Tensor = function(
            data["old_logprobs"], data["logprobs"], advantages, MASK.double(), config=config
        )[0]
        return loss

    return loss_of


def test_verl_dro() -> None:
    data = columns()
    verl = configured_verl_loss("compute_policy_loss_dro", dro_beta=0.5)
    compare(ours(DRO(coef=0.5), TokenMean(), data), theirs(verl, data))


@pytest.mark.parametrize("fraction", [0.01, 0.2])
@pytest.mark.parametrize("seed", [0, 3])
def test_verl_kl_cov(fraction: float, seed: int) -> None:
    data = columns(seed)
    verl = configured_verl_loss("compute_policy_loss_kl_cov", kl_cov_ratio=fraction, ppo_kl_coef=0.7)
    compare(ours(KLCov(fraction=fraction, coef=0.7), TokenMean(), data), theirs(verl, data))


def test_verl_penalises_a_token_of_every_micro_batch_even_without_contrast() -> None:
    """Where all advantages are equal no token has a covariance, and ours penalises none."""
    algorithms = verl_losses()
    options = types.SimpleNamespace(kl_cov_ratio=0.01, ppo_kl_coef=1e3)
    config = types.SimpleNamespace(policy_loss=options, global_batch_info={})
    data = columns()
    data["advantages"] = torch.zeros_like(data["advantages"])
    found = algorithms.compute_policy_loss_kl_cov(
        data["old_logprobs"],
        data["logprobs"],
        data["advantages"].unsqueeze(1).expand(MASK.shape),
        MASK.double(),
        config=config,
    )[0]
    assert float(found) > 1.0
    assert ours(KLCov(fraction=0.01, coef=1e3), TokenMean(), data)[0] == 0.0


def test_verl_gpg_is_reinforce() -> None:
    case = Verl("gpg", Reinforce(), "token-mean", {})
    data = columns()
    compare(ours(Reinforce(), TokenMean(), data), theirs(lambda d: verl_loss(case, d), data))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+", "low_var_kl"])
def test_verl_kl(name: str) -> None:
    algorithms = verl_losses()
    data = columns(spread=2.0)
    leaf = data["logprobs"].clone().requires_grad_()
    found = algorithms.kl_penalty(leaf, data["ref_logprobs"], name)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    estimator = "k3" if name == "low_var_kl" else name
    clamp = 10.0 if estimator.startswith("k3") else None  # verl's k3 is its low_var_kl
    value, slope = kl_estimate(data["logprobs"] - data["ref_logprobs"], estimator, output_clamp=clamp)
    torch.testing.assert_close(value, found.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, gradient, rtol=1e-12, atol=1e-12)


def test_verl_loses_the_k3_gradient_that_we_keep() -> None:
    algorithms = verl_losses()
    leaf = torch.tensor([-30.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(algorithms.kl_penalty(leaf, torch.zeros(1), "k3").sum(), leaf)
    assert gradient.item() == 0.0
    assert kl_estimate(torch.tensor([-30.0]), "k3")[1].item() < -1e8


def test_verl_stops_the_gspo_gradient_at_a_ratio_that_we_still_correct() -> None:
    case = Verl("gspo", GSPOToken(), "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2})
    data = columns()
    data["logprobs"], data["old_logprobs"] = data["logprobs"] - 0.0, data["logprobs"] - 12.0
    data["advantages"] = -torch.ones(MASK.shape[0], dtype=torch.float64)
    loss, gradient = theirs(lambda d: verl_loss(case, d), data)
    assert gradient.abs().max() == 0.0
    assert loss == pytest.approx(22026.4657948)
    loss, gradient = ours(GSPOToken(clip_low=0.2, clip_high=0.2), TokenMean(), data)
    assert loss == pytest.approx(162754.791419)
    assert (gradient[MASK] > 0).all()


# --- TRL ----------------------------------------------------------------------------------------------

TRL: dict[str, tuple[PolicyLoss, LossReduction, dict[str, Any]]] = {
    "grpo": (ClippedSurrogate(), SequenceMean(), {}),
    "bnpo": (ClippedSurrogate(clip_high=0.28), TokenMean(), {"epsilon_high": 0.28}),
    "dr_grpo": (ClippedSurrogate(), FixedBudget(max_tokens=8), {}),
    "dapo": (
        ClippedSurrogate(clip_high=0.28, ratio_cap=1.5),
        TokenMean(),
        {"epsilon_high": 0.28, "delta": 1.5},
    ),
    "cispo": (CISPO(bounds="upper", ratio_cap=1.3), TokenMean(), {"epsilon_high": 1.3}),
    "sapo": (SAPO(), SequenceMean(), {}),
    "luspo": (
        GSPO(clip_low=0.05, clip_high=None),
        SequenceSum(),
        {"epsilon_low": 0.05, "epsilon_high": 0.05, "importance_sampling_level": "sequence"},
    ),
    "vespo": (VESPO(), TokenMean(), {}),
}


@pytest.mark.parametrize("name", TRL)
def test_trl(name: str) -> None:
    part, reduction, options = TRL[name]
    data = columns()
    found = theirs(lambda d: trl_loss(d, MASK, loss_type=name, **options), data)
    # TRL keeps SAPO's temperatures in float32, whatever the inputs are.
    compare(ours(part, reduction, data), found, 1e-6 if name == "sapo" else 1e-10)


def test_trl_gspo() -> None:
    options = {"epsilon_low": 0.05, "epsilon_high": 0.1, "importance_sampling_level": "sequence"}
    data = columns(3)
    found = theirs(lambda d: trl_loss(d, MASK, loss_type="grpo", **options), data)
    compare(ours(GSPO(clip_low=0.05, clip_high=0.1), SequenceMean(), data), found)


def test_trl_multiplies_the_reference_divergence_by_the_ratio() -> None:
    data = columns(4)
    for corrected, estimator in ((True, "ratio_k3"), (False, "k3")):
        found = theirs(
            lambda d: trl_loss(d, MASK, loss_type="grpo", beta=0.1, use_bias_correction_kl=corrected),
            data,
        )
        kl = KLPenalty(coef=0.1, estimator=estimator)
        compare(ours(ClippedSurrogate(), SequenceMean(), data, kl=kl), found)


def test_trl_entropy_mask() -> None:
    data = columns(5)
    found = theirs(lambda d: trl_loss(d, MASK, loss_type="bnpo", top_entropy_quantile=0.3), data)
    compare(ours(ClippedSurrogate(), TokenMean(), data, entropy_mask=EntropyMask(fraction=0.3)), found)


def test_trl_gradient_of_a_far_token_is_nan_and_ours_is_not() -> None:
    data = columns()
    data = {name: column.float() for name, column in data.items()}
    data["logprobs"][0, 0] = data["old_logprobs"][0, 0] + 100.0
    data["advantages"][0] = 1.0
    _, gradient = theirs(lambda d: trl_loss(d, MASK, loss_type="sapo"), data)
    assert gradient[0, 0].isnan()
    _, gradient = ours(SAPO(), SequenceMean(), data)
    assert gradient[MASK].isfinite().all()


# --- Liger --------------------------------------------------------------------------------------------

LIGER: dict[str, tuple[PolicyLoss, LossReduction, dict[str, Any]]] = {
    "grpo": (ClippedSurrogate(), SequenceMean(), {}),
    "bnpo": (ClippedSurrogate(), TokenMean(), {}),
    "dr_grpo": (ClippedSurrogate(), FixedBudget(max_tokens=8), {"max_completion_length": 8}),
    "cispo": (CISPO(bounds="upper", ratio_cap=1.3), TokenMean(), {"epsilon_high": 1.3}),
    "sapo": (SAPO(), SequenceMean(), {}),
    "vespo": (VESPO(), TokenMean(), {}),
    "luspo": (
        GSPO(clip_low=0.05, clip_high=None),
        SequenceSum(),
        {"epsilon_low": 0.05, "epsilon_high": 0.05, "importance_sampling_level": "sequence"},
    ),
}


@pytest.mark.parametrize("name", LIGER)
def test_liger(name: str) -> None:
    part, reduction, options = LIGER[name]
    data = columns(6)
    del data["ref_logprobs"]
    found = theirs(lambda d: liger_loss(d, MASK, loss_type=name, **options), data)
    compare(ours(part, reduction, {**data, "ref_logprobs": data["old_logprobs"]}), found, 1e-9)


def test_liger_weighs_token_level_luspo_differently_from_trl() -> None:
    """With token ratios the two disagree; LUSPO is about sequence ratios, so it is GSPO's loss here."""
    data = columns(7)
    options = {"loss_type": "luspo", "importance_sampling_level": "token"}
    one = theirs(lambda d: trl_loss(d, MASK, **options), data)
    two = theirs(lambda d: liger_loss(d, MASK, **options), data)
    assert abs(one[0] - two[0]) > 1e-3
    objective = Objective.named("luspo")
    assert objective.policy_loss.sequence_level
    assert objective.reduction == SequenceSum()
    assert replace(objective, name="again").policy_loss == GSPO(clip_low=2e-3, clip_high=2.5e-3)
