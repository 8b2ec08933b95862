"""The window is the optimizer step: any cut, any generation schedule, empty windows, garbage under the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from rlobjectives import GDPO, GRPO, NonFiniteError, Objective, PromptMean, TokenMean
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer
from tests.integrations.trl import tiny
from tests.integrations.trl.parts import FIRST, REWARDS, STEPS, MeanDrift, Snapshots, fed, rotate

TOLERANCE = 2e-6


def run(
    objective: object,
    *,
    spoil: Callable[[Any], None] | None = None,
    extra: dict[str, Any] | None = None,
    **overrides: object,
) -> tuple[Tensor, Any]:
    config = GRPOConfig(**tiny.options(**overrides))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, objective=objective, **(extra or {}))
    if spoil is not None:
        spoil(trained)
    trained.train()
    return tiny.parameters(trained), trained


def cut(micro_batches: int) -> dict[str, int]:
    return {
        "gradient_accumulation_steps": micro_batches,
        "per_device_train_batch_size": 8 // micro_batches,
        "max_steps": 2,
    }


def snapshots(micro_batches: int) -> dict[str, Tensor]:
    """Parameters after every registered objective had a fresh and a stale step, one after the other."""
    kept: list[Snapshots] = []

    def spoil(trained: Any) -> None:
        rotate(trained)
        kept.append(Snapshots(trained))
        trained.add_callback(kept[0])

    steps = {"max_steps": STEPS * len(fed()), "num_iterations": STEPS, "learning_rate": 0.05}
    extra = {"model": tiny.saved(), "reward_funcs": list(REWARDS)}
    _, trained = run(FIRST, spoil=spoil, extra=extra, **{**cut(micro_batches), **steps})
    losses = [entry["loss/total"] for entry in trained.state.log_history if "loss/total" in entry]
    assert len(losses) == STEPS * len(fed())
    return kept[0].taken


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return snapshots(1)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_every_fed_objective_is_the_same_for_any_cut(micro_batches: int, whole: dict[str, Tensor]) -> None:
    """8×1, 4×2, 2×4 and 1×8, with ratios that are 1 and that are not."""
    assert len(fed()) >= 27
    found = snapshots(micro_batches)
    assert whole.keys() == found.keys() == set(fed())
    gaps = {name: float((found[name] - whole[name]).abs().max()) for name in fed()}
    assert max(gaps.values()) <= TOLERANCE, gaps
    # Every one of them moved the weights, twice.
    before = tiny.parameters(tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options())))
    for name in fed():
        assert float((whole[name] - before).abs().max()) > 1e-5, name
        before = whole[name]


def test_generation_longer_and_shorter_than_the_step_and_two_passes() -> None:
    """16 sequences a generation, 8 a step: the second step is off policy; and both pass twice over them."""
    stale = {"num_iterations": 2, "max_steps": 4}
    one, _ = run("gdpo", **stale, per_device_train_batch_size=8, steps_per_generation=2)
    four, trained = run(
        "gdpo",
        **stale,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
    )
    assert float((one - four).abs().max()) <= TOLERANCE
    ratios = [entry["policy/ratio_std"] for entry in trained.state.log_history if "policy/ratio_std" in entry]
    assert ratios[0] == pytest.approx(0.0, abs=1e-6)
    assert min(ratios[1:]) > 1e-3
    # Two generation batches inside one step.
    longer = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    wide, trained = run("gdpo", **longer, max_steps=1)
    whole, _ = run("gdpo", per_device_train_batch_size=16, max_steps=1)
    assert float((wide - whole).abs().max()) <= TOLERANCE
    assert trained.state.log_history[0]["window/sequences"] == 16


def test_prepass_sees_the_whole_window_and_costs_nothing_when_the_weights_have_not_moved() -> None:
    objective = Objective(estimator=GDPO(), policy_loss=MeanDrift(), reduction=TokenMean())
    shape = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
    calls: list[bool] = []

    def count(trained: Any) -> None:
        trained.self_test = False  # its forwards are not the window's
        compute = trained._get_per_token_logps_and_entropies

        def counted(*args: object, **kwargs: object) -> object:
            calls.append(torch.is_grad_enabled())
            return compute(*args, **kwargs)

        trained._get_per_token_logps_and_entropies = counted

    one, _ = run(objective, spoil=count, **shape)
    # Generation, training; then pre-pass (the weights have moved), training.
    assert calls == [False, True, False, True]
    four, _ = run(objective, gradient_accumulation_steps=4, per_device_train_batch_size=2, **shape)
    assert float((one - four).abs().max()) <= TOLERANCE


def test_prompts_are_counted_over_the_window() -> None:
    objective = Objective(estimator=GRPO(), reduction=PromptMean())
    one, _ = run(objective, **cut(1))
    many, _ = run(objective, **cut(8))
    assert float((one - many).abs().max()) <= TOLERANCE


def empty(trained: Any) -> None:
    """Nothing counts in the first step."""
    scored = trained._generate_and_score_completions

    def masked(inputs: object) -> dict:
        output = scored(inputs)
        if trained.state.global_step == 0:
            output["completion_mask"] = torch.zeros_like(output["completion_mask"])
            output["num_items_in_batch"] = torch.tensor(0)
        return output

    trained._generate_and_score_completions = masked


def test_an_empty_window_changes_nothing() -> None:
    decay = {"optim": "adamw_torch", "weight_decay": 0.5, "learning_rate": 0.1, "lr_scheduler_type": "linear"}
    before = tiny.parameters(tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options())))
    after, trained = run("gdpo", spoil=empty, max_steps=1, gradient_accumulation_steps=2, **decay)
    assert torch.equal(before, after)
    assert trained.state.log_history[0]["window/skipped"] == 1.0
    assert trained.state.global_step == 1
    # The next window is as if it were the first: same schedule, same weights.
    skipped, trained = run("gdpo", spoil=empty, max_steps=2, **decay)
    assert float((skipped - before).abs().max()) > 1e-3
    rates = [entry["learning_rate"] for entry in trained.state.log_history if "learning_rate" in entry]
    assert rates[0] == rates[1]
    # Stock TRL steps: weight decay alone moves the weights (and in 1.0 nothing over nothing makes them NaN).
    stock = tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options(max_steps=1, **decay)))
    empty(stock)
    stock.train()
    assert not float((tiny.parameters(stock) - before).abs().max()) <= 1e-3


def spoiled(value: float, *, masked: bool) -> Callable[[Any], None]:
    """Log-probabilities with a bad value at one masked, or one counted, place."""

    def spoil(trained: Any) -> None:
        compute = trained._get_per_token_logps_and_entropies

        def changed(
            model: object,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            *args: object,
            **kwargs: object,
        ) -> tuple:
            logprobs, *rest = compute(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            counted = attention_mask[:, -logits_to_keep:].bool()
            place = counted.logical_not() if masked else counted.cumsum(1).eq(1) & counted
            place &= place.flatten().cumsum(0).eq(1).view_as(place)
            bad = torch.full_like(logprobs, value)
            return torch.where(place, bad, logprobs), *rest

        trained._get_per_token_logps_and_entropies = changed

    return spoil


def stock_loss(spoil: Callable[[Any], None], **overrides: object) -> float:
    stock = tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options(max_steps=1, **overrides)))
    stock.args.logging_nan_inf_filter = False
    spoil(stock)
    stock.train()
    return float(stock.state.log_history[0]["loss"])


def test_garbage_under_the_mask_changes_nothing_here_and_poisons_stock() -> None:
    clean, _ = run("gdpo", max_steps=1)
    dirty, _ = run("gdpo", spoil=spoiled(float("nan"), masked=True), max_steps=1)
    assert torch.equal(clean, dirty)
    assert torch.tensor(stock_loss(spoiled(float("nan"), masked=True))).isnan()


def test_a_bad_value_at_a_counted_token_is_an_error_before_the_step() -> None:
    config = GRPOConfig(**tiny.options(max_steps=1, gradient_accumulation_steps=2))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, objective="gdpo")
    spoiled(float("nan"), masked=False)(trained)
    trained.self_test = False  # which would say so before the window does
    before = tiny.parameters(trained)
    with pytest.raises(NonFiniteError, match="logprobs has 1 non-finite"):
        trained.train()
    assert torch.equal(before, tiny.parameters(trained))


def drifted(trained: Any) -> None:
    """Log-probabilities in training as they are; the old ones are 95 nats below."""
    compute = trained._get_per_token_logps_and_entropies

    def changed(*args: object, **kwargs: object) -> tuple:
        logprobs, *rest = compute(*args, **kwargs)
        return logprobs if torch.is_grad_enabled() else logprobs - 95.0, *rest

    trained._get_per_token_logps_and_entropies = changed


def test_a_log_ratio_of_95_stays_finite_here_and_ruins_stock() -> None:
    shape = {"steps_per_generation": 2, "max_steps": 1, "gradient_accumulation_steps": 1}
    after, trained = run(
        {"name": "gdpo", "estimator": "tests.integrations.trl.test_windows:minus_one"}, spoil=drifted, **shape
    )
    assert torch.isfinite(after).all()
    assert trained.state.log_history[0]["policy/ratio_max"] == pytest.approx(torch.tensor(20.0).exp().item())

    stock = tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options(**shape)))
    scored = stock._generate_and_score_completions

    def pushed_down(inputs: object) -> dict:
        output = scored(inputs)
        output["advantages"] = -torch.ones_like(output["advantages"])
        return output

    stock._generate_and_score_completions = pushed_down
    drifted(stock)
    stock.train()
    assert not torch.isfinite(tiny.parameters(stock)).all()


def minus_one(rollouts: Any) -> Tensor:
    return -torch.ones(rollouts.num_sequences, dtype=torch.float64)


def test_an_infinite_reward_is_an_error() -> None:
    def broken(completions: list[str], **_: object) -> list[float]:
        return [float("inf"), *[0.0] * (len(completions) - 1)]

    config = GRPOConfig(**tiny.options(max_steps=1))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, objective="grpo", reward_funcs=[broken])
    with pytest.raises(NonFiniteError, match="broken"):
        trained.train()
