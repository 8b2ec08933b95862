"""Where scopes agree, stock TRL and ours give the same parameters; where they differ on purpose, both are shown."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rlobjectives import ALGORITHMS, GRPO, CapabilityError, ClippedSurrogate, Objective, SequenceMean
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer, ObjectiveRLOOTrainer
from tests.integrations.trl import tiny
from tests.integrations.trl.parts import fed

FIELDS = {one.name for one in dataclasses.fields(GRPOConfig)}
TRL_EPSILON = {"estimator": {"epsilon": 1e-4}}
PAIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "grpo": ({"loss_type": "grpo"}, {"name": "grpo", **TRL_EPSILON}),
    "grpo_batch": (
        {"loss_type": "grpo", "scale_rewards": "batch"},
        {"name": "grpo", "estimator": {"epsilon": 1e-4, "scale": "batch"}},
    ),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "dr_grpo"),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"name": "dapo", **TRL_EPSILON}),
    "gdpo": ({"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"}, "gdpo"),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"name": "cispo", **TRL_EPSILON, "policy_loss": {"bounds": "upper", "ratio_cap": 5.0}},
    ),
    "sapo": ({"loss_type": "sapo"}, {"name": "sapo", **TRL_EPSILON}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"name": "gspo", **TRL_EPSILON, "policy_loss": {"clip_low": 3e-4, "clip_high": 4e-4}},
    ),
    "luspo": (
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
        },
        {"name": "luspo", **TRL_EPSILON},
    ),
    "vespo": ({"loss_type": "vespo"}, {"name": "vespo", **TRL_EPSILON}),
    "two_sided": (
        {"loss_type": "grpo", "delta": 1.5},
        {"name": "grpo", **TRL_EPSILON, "policy_loss": {"ratio_cap": 1.5}},
    ),
}
"""Options of stock TRL, and the objective that means the same."""


def run(kind: type, config: object, **extra: object) -> torch.Tensor:
    trained = tiny.trainer(kind, config, **extra)
    trained.train()
    return tiny.parameters(trained)


def gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


@pytest.mark.parametrize("name", PAIRS)
def test_same_parameters_after_three_steps(name: str) -> None:
    stock, objective = PAIRS[name]
    if not set(stock) <= FIELDS:
        pytest.skip(f"this TRL has no {sorted(set(stock) - FIELDS)}")
    # Two passes over each generation batch, so that ratios differ from 1.
    cut = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "num_iterations": 2,
        "learning_rate": 0.1,
    }
    theirs = run(GRPOTrainer, GRPOConfig(**tiny.options(**cut, **stock)))
    ours = run(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options(**cut)), objective=objective)
    assert gap(theirs, ours) <= 1e-6
    assert gap(ours, tiny.parameters(tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options())))) > 1e-3


def test_same_parameters_with_a_reference_policy_and_a_second_pass() -> None:
    """`beta` is carried over: TRL builds the reference model, the penalty is ours."""
    results = []
    for kind, extra, chosen in (
        (GRPOTrainer, {"loss_type": "grpo"}, {}),
        (ObjectiveGRPOTrainer, {}, {"objective": {"name": "grpo", **TRL_EPSILON}}),
    ):
        config = GRPOConfig(**tiny.options(beta=0.1, num_iterations=2, learning_rate=0.1, **extra))
        results.append(run(kind, config, model=tiny.saved(), **chosen))
    assert gap(*results) <= 1e-6


def test_weights_of_the_config_reach_the_estimator() -> None:
    weights = {"reward_weights": [0.3, 2.0]}
    theirs = run(GRPOTrainer, GRPOConfig(**tiny.options(loss_type="grpo", **weights)))
    ours = run(
        ObjectiveGRPOTrainer,
        GRPOConfig(**tiny.options(**weights)),
        objective={"name": "grpo", **TRL_EPSILON},
    )
    assert gap(theirs, ours) <= 1e-6


def test_rloo_trainer() -> None:
    """On policy its sequence-level surrogate has the gradient of REINFORCE over the sequence's sum."""
    theirs = run(RLOOTrainer, RLOOConfig(**tiny.options(beta=0.0)), rollout_func=None, generated=True)
    objective = {"name": "reinforce", "estimator": {"scale": "none", "baseline": "leave_one_out"}}
    ours = run(
        ObjectiveRLOOTrainer,
        RLOOConfig(**tiny.options(beta=0.0)),
        objective=objective,
        rollout_func=None,
        generated=True,
    )
    assert gap(theirs, ours) <= 1e-6


def test_a_micro_batch_mean_depends_on_the_cut_and_ours_does_not() -> None:
    """TRL's `bnpo` divides by the micro-batch's tokens; the token mean over the window has no cut."""
    cuts = [
        {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps} for steps in (1, 8)
    ]
    theirs = [run(GRPOTrainer, GRPOConfig(**tiny.options(loss_type="bnpo", **cut))) for cut in cuts]
    objective = Objective(estimator=GRPO(epsilon=1e-4), policy_loss=ClippedSurrogate())
    ours = [run(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options(**cut)), objective=objective) for cut in cuts]
    assert gap(*theirs) > 1e-3
    assert gap(*ours) <= 2e-6
    assert gap(theirs[0], ours[0]) <= 1e-6  # one micro-batch: the two scopes are one


def test_accumulation_shorter_than_generation_uses_the_steps_own_tokens() -> None:
    """TRL's `dapo` gives every step the generation batch's average count; a token mean is a mean in every step."""
    shape = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    losses = []
    for kind, extra, chosen in (
        (GRPOTrainer, {"loss_type": "dapo"}, {}),
        (ObjectiveGRPOTrainer, {}, {"objective": constant_objective()}),
    ):
        trained = tiny.trainer(
            kind, GRPOConfig(**tiny.options(**shape, max_steps=2, learning_rate=0.0, **extra)), **chosen
        )
        if kind is GRPOTrainer:
            scored = trained._generate_and_score_completions

            def constant(inputs: object, scored: object = scored) -> dict:
                output = scored(inputs)
                output["advantages"] = torch.ones_like(output["advantages"])
                return output

            trained._generate_and_score_completions = constant
        trained.train()
        losses.append([entry["loss"] for entry in trained.state.log_history if "loss" in entry])
    stock, ours = losses
    # Advantage 1 and a policy that stands still: every token's loss is −1, and so is any mean over tokens.
    assert [float(loss) for loss in ours[:2]] == pytest.approx([-1.0, -1.0], abs=1e-3)
    # Older releases also forget that a step is only half of the generation batch.
    half = 1.0 if "/ self.args.steps_per_generation" in inspect.getsource(GRPOTrainer) else 0.5
    assert [float(loss) for loss in stock[:2]] == pytest.approx([-1.176 * half, -0.8235 * half], abs=1e-3)


def constant_objective() -> Objective:
    return Objective(
        estimator=lambda rollouts: torch.ones(rollouts.num_sequences, dtype=torch.float64),
        policy_loss=ClippedSurrogate(clip_low=1.0, clip_high=1e6),
    )


def test_what_cannot_be_fed_is_refused_with_a_reason() -> None:
    left = sorted(set(ALGORITHMS) - set(fed()))
    reasons = {
        "optimal_token_baseline": "squared_probs",
        "ppo": "a critic",
        "remax": "greedy_rewards",
        "vapo": "a critic",
        "vtrace": "a critic",
    }
    assert left == sorted(reasons)
    for name, reason in reasons.items():
        with pytest.raises(CapabilityError, match=reason):
            tiny.trainer(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options()), objective=name)


def test_sequence_mean_counts_truncated_sequences_as_documented() -> None:
    """Masked truncated completions leave both sums of a token mean; `SequenceMean` still counts the sequence."""
    config = {"mask_truncated_completions": True}
    theirs = run(GRPOTrainer, GRPOConfig(**tiny.options(loss_type="grpo", **config)))
    objective = Objective(estimator=GRPO(epsilon=1e-4), reduction=SequenceMean())
    ours = run(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options(**config)), objective=objective)
    assert gap(theirs, ours) <= 1e-6
