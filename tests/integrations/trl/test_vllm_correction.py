"""TRL's correction for vLLM's log-probabilities against `ImportanceCorrection`: the same update in all four modes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer

from rlobjectives import VESPO, ImportanceCorrection, Objective
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer
from rlobjectives.integrations.trl.objective_source import as_objective
from tests.integrations.trl import tiny

FIELDS = {one.name for one in dataclasses.fields(GRPOConfig)}
BOUND = "vllm_importance_sampling_clip_max"
if BOUND not in FIELDS:
    BOUND = "vllm_importance_sampling_cap"
TOLERANCE = 5e-7
OPTIONS = {"max_steps": 2, "learning_rate": 0.1}
EPSILON = {"epsilon": 1e-4}


def sampler() -> Any:
    """Completions as ever, with log-probabilities near those of the untrained policy and on both sides of them."""
    plain = tiny.fixed_rollout({})

    def rollout(batch: list[str], trainer: Any) -> dict[str, Any]:
        found = plain(batch, trainer)
        found["logprobs"] = [[-3.9 + 0.4 * (token % 4) for token in ids] for ids in found["completion_ids"]]
        return found

    return rollout


def stock(mode: str, bound: float, loss: str, **options: Any) -> Any:
    """TRL with the engine faked: the sampler above in its place, and the correction on."""
    given = {
        **OPTIONS,
        "loss_type": loss,
        "vllm_importance_sampling_mode": mode,
        BOUND: bound,
        **options,
    }
    trained = tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options(**given)), rollout_func=sampler())
    trained.use_vllm = trained.vllm_importance_sampling_correction = True
    trained.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trained._last_loaded_step = 0
    trained.train()
    return trained


def ours(objective: Any, **options: Any) -> Any:
    config = GRPOConfig(**tiny.options(**{**OPTIONS, **options}))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, rollout_func=sampler(), objective=objective)
    trained.train()
    return trained


def gap(left: Any, right: Any) -> float:
    return float((tiny.parameters(left) - tiny.parameters(right)).abs().max())


def logged(trained: Any, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_every_mode_is_that_of_trl(mode: str, iterations: int) -> None:
    weight, outside = mode.split("_")
    bound = {"token": 1.2, "sequence": 0.5}[weight]
    correction = ImportanceCorrection(weight=weight, outside=outside, high=bound)
    objective = {
        "name": "dapo", "estimator": EPSILON, "policy_loss": {"clip_high": 0.2}, "correction": correction
    }  # fmt: skip
    mine = ours(objective, num_iterations=iterations)
    assert gap(stock(mode, bound, "dapo", num_iterations=iterations), mine) <= TOLERANCE
    # The bound cut some and not all of them, and without the correction the update is another.
    cut = logged(mine, "correction/outside_fraction")
    assert len(cut) == 2 and all(0.0 < share < 1.0 for share in cut)
    plain = ours({**objective, "correction": None}, num_iterations=iterations)
    assert gap(plain, mine) > 1e-4


def test_sequence_losses_take_weights_of_sequences() -> None:
    clip = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    correction = ImportanceCorrection(weight="sequence", outside="mask", high=0.5)
    mine = ours({"name": "gspo", "estimator": EPSILON, "correction": correction}, num_iterations=2)
    assert gap(stock("sequence_mask", 0.5, "grpo", num_iterations=2, **clip), mine) <= TOLERANCE


@pytest.mark.parametrize("iterations", [1, 2])
def test_vespo_folds_the_sampler_into_its_own_weight(iterations: int) -> None:
    """TRL puts the (truncated) ratio into φ; a correction would multiply φ by it."""
    if "vespo_k_pos" not in FIELDS:
        pytest.skip("this TRL has no VESPO")
    named = as_objective({"name": "vespo", "estimator": EPSILON})
    folded = dataclasses.replace(named, policy_loss=VESPO(base="behavior"))
    mine = ours(folded, num_iterations=iterations)
    assert gap(stock("token_truncate", 1e6, "vespo", num_iterations=iterations), mine) <= TOLERANCE
    correction = ImportanceCorrection(weight="token", outside="truncate", high=1e6)
    multiplied: Objective = dataclasses.replace(named, correction=correction)
    assert gap(ours(multiplied, num_iterations=iterations), mine) > 1e-4
