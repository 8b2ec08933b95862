"""What people run with: adapters, checkpoints, evaluation, dynamic sampling, their own estimators, the log."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOConfig, GRPOTrainer

from rlobjectives import (
    GRPO,
    BatchBaseline,
    CapabilityError,
    Estimator,
    FunctionEstimator,
    ImportanceCorrection,
    KLPenalty,
    Objective,
    Rollouts,
    SequenceMean,
    ShapeError,
)
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from rlobjectives.integrations.trl.columns import KEPT
from tests.integrations.trl import tiny

GRPO_TRL = {"name": "grpo", "estimator": {"epsilon": 1e-4}}


def train(objective: Any, config: type = GRPOConfig, extra: Any = None, **overrides: Any) -> Any:
    trained = tiny.trainer(
        ObjectiveGRPOTrainer, config(**tiny.options(**overrides)), objective=objective, **(extra or {})
    )
    trained.train()
    return trained


def history(trained: Any, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


def test_a_function_is_an_estimator() -> None:
    seen: list[Rollouts] = []

    def centred(rollouts: Rollouts) -> torch.Tensor:
        seen.append(rollouts)
        total = rollouts.rewards.sum(1).view(-1, tiny.GROUP)
        return (total - total.mean(1, keepdim=True)).flatten()

    ours = train(Objective(estimator=centred, reduction=SequenceMean()), gradient_accumulation_steps=2)
    assert ours.objective.name == "centred"
    rollouts = seen[0]
    assert rollouts.reward_names == ("even", "short")
    assert rollouts.groups.sizes.tolist() == [tiny.GROUP] * 4
    assert not rollouts.scored.all()
    named = train({"name": "grpo", "estimator": {"scale": "none"}}, gradient_accumulation_steps=2)
    assert float((tiny.parameters(ours) - tiny.parameters(named)).abs().max()) <= 1e-6


def test_a_reward_may_be_a_coroutine() -> None:
    async def even(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return tiny.even(completions, completion_ids)

    async def short(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return tiny.short(completions, completion_ids)

    plain = train("gdpo", max_steps=2)
    awaited = train("gdpo", extra={"reward_funcs": [even, short]}, max_steps=2)
    assert torch.equal(tiny.parameters(plain), tiny.parameters(awaited))
    assert history(plain, "loss/total") == history(awaited, "loss/total")


class TokenLevel(Estimator):
    """The centred reward at the last token only."""

    token_level = True

    def estimate(self, rollouts: Rollouts) -> torch.Tensor:
        layout = rollouts.tokens("TokenLevel")
        total = rollouts.rewards.sum(1)
        last = layout.mask.cumsum(1) == layout.token_counts().unsqueeze(1)
        return torch.where(last & layout.mask, layout.expand(total - total.mean()), 0.0)


def test_advantages_per_token() -> None:
    objective = Objective(estimator=TokenLevel())
    one, many = (
        train(objective, per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps)
        for steps in (1, 4)
    )
    assert float((tiny.parameters(one) - tiny.parameters(many)).abs().max()) <= 2e-6


def test_adapters_and_checkpointing_follow_stock() -> None:
    peft = pytest.importorskip("peft")
    results = []
    for kind, extra, chosen in (
        (GRPOTrainer, {"loss_type": "grpo"}, {}),
        (ObjectiveGRPOTrainer, {}, {"objective": GRPO_TRL}),
    ):
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        options = tiny.options(gradient_checkpointing=True, gradient_accumulation_steps=2, beta=0.1, **extra)
        trained = tiny.trainer(kind, GRPOConfig(**options), peft_config=lora, **chosen)
        trained.train()
        assert any("lora" in name for name, _ in trained.model.named_parameters())
        results.append(tiny.parameters(trained))
    assert float((results[0] - results[1]).abs().max()) <= 1e-6


def evaluated(per_batch: int, prompts: int, objective: Any = "gdpo") -> Any:
    options = tiny.options(
        max_steps=1,
        do_eval=True,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=per_batch,
        learning_rate=0.0,
    )
    trained = tiny.trainer(
        ObjectiveGRPOTrainer, GRPOConfig(**options), objective=objective, eval_dataset=tiny.prompts(prompts)
    )
    step, trained.losses = trained.prediction_step, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        trained.losses.append(float(found[0]))
        return found

    trained.prediction_step = noted
    trained.train()
    return trained


def test_evaluation_uses_the_objective() -> None:
    trained = evaluated(4, 1)
    assert history(trained, "eval_window/sequences") == [4.0]
    assert history(trained, "eval_loss") == history(trained, "eval_loss/total")
    assert history(trained, "eval_loss")[0] == pytest.approx(trained.losses[0], abs=1e-6)
    assert abs(trained.losses[0]) > 1e-3
    assert history(trained, "eval_reward/even/mean")
    assert len(history(trained, "window/tokens")) == 1


def test_every_evaluated_sequence_counts_once() -> None:
    """Five prompts, four completions of each: two full batches of eight and a ragged one of four."""
    # A mean over sequences and a baseline from the group alone: no batch size may matter.
    mean = {"name": "rloo", "reduction": SequenceMean()}
    ragged, whole = evaluated(8, 5, mean), evaluated(20, 5, mean)
    for name in ("eval_loss", "eval_loss/total", "eval_reward/even/mean"):
        assert history(ragged, name) == pytest.approx(history(whole, name), abs=1e-6), name
    assert history(ragged, "eval_window/sequences") == pytest.approx([20 / 3])
    one, two, three = ragged.losses
    assert history(ragged, "eval_loss")[0] == pytest.approx((8 * one + 8 * two + 4 * three) / 20, abs=1e-6)
    # The Trainer repeats each loss eight times and cuts the last to 5 % 8 rows, for it counts prompts.
    theirs = (8 * one + 8 * two + 5 * three) / 21
    assert theirs != pytest.approx(history(whole, "eval_loss")[0], abs=1e-4)


def test_evaluation_with_one_completion_logs_rewards_only() -> None:
    options = tiny.options(
        max_steps=1,
        do_eval=True,
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = tiny.trainer(
            ObjectiveGRPOTrainer, GRPOConfig(**options), objective="gdpo", eval_dataset=tiny.prompts(2)
        )
    assert any("evaluation loss is 0" in str(one.message) for one in said)
    trained.train()
    assert history(trained, "eval_loss") == [0.0]
    assert history(trained, "eval_rewards/even/mean")


def dead_at_first(rounds: int) -> Any:
    """A reward without signal in the first group, for a number of rounds."""
    calls = {"made": 0}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls["made"] += 1
        flat = calls["made"] <= rounds
        return [
            1.0 if flat and row < tiny.GROUP else float(ids[0] % 7) for row, ids in enumerate(completion_ids)
        ]

    return reward


def sampled(mode: str, rounds: int, **overrides: Any) -> Any:
    rewards = {"reward_funcs": [dead_at_first(rounds)]}
    return train(
        GRPO_TRL,
        ObjectiveConfig,
        extra=rewards,
        max_steps=1,
        dynamic_sampling=mode,
        learning_rate=0.1,
        **overrides,
    )


def test_groups_without_signal_are_dropped() -> None:
    off, drop = sampled("off", 9), sampled("drop", 9)
    assert history(off, "window/sequences") == [8.0]
    assert history(drop, "window/sequences") == [4.0]
    assert history(drop, "sampling/dropped_group_fraction") == [0.5]
    assert history(drop, "sampling/extra_rounds") == [0.0]
    # A mean over four sequences instead of eight: twice the step.
    start = tiny.parameters(tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options())))
    moved = [tiny.parameters(one) - start for one in (off, drop)]
    assert float((moved[1] - 2 * moved[0]).abs().max()) <= 1e-6
    assert float(moved[0].abs().max()) > 1e-4


def test_groups_without_signal_are_sampled_again_within_bounds() -> None:
    good = sampled("resample", 1)
    assert history(good, "window/sequences") == [8.0]
    assert history(good, "sampling/resampled_group_fraction") == [0.5]
    assert history(good, "sampling/extra_rounds") == [1.0]
    never = sampled(
        "resample", 9, max_resamples=2, gradient_accumulation_steps=2, per_device_train_batch_size=4
    )
    assert history(never, "window/sequences") == [4.0]
    assert history(never, "sampling/extra_rounds") == [2.0]
    assert history(never, "sampling/dropped_group_fraction") == [0.5]


def test_images_of_a_tool_are_not_mixed_between_rounds() -> None:
    """Two rounds over the same prompts see the same pictures, unless a tool brought its own."""

    def with_pixels(change: bool) -> Any:
        trained = tiny.trainer(
            ObjectiveGRPOTrainer,
            ObjectiveConfig(**tiny.options(max_steps=1, dynamic_sampling="resample")),
            objective=GRPO_TRL,
            reward_funcs=[dead_at_first(1)],
        )
        # As TRL packs them: rows are patches, and of a number that has nothing to do with the sequences.
        pixels, grid = torch.arange(20.0).view(10, 2), torch.tensor([[1, 2, 5]])
        scored, rounds = GRPOTrainer._generate_and_score_completions, []

        def seen(self: Any, inputs: Any) -> dict[str, Any]:
            rounds.append(1)
            shift = len(rounds) if change else 0.0
            return {**scored(self, inputs), "pixel_values": pixels + shift, "image_grid_thw": grid}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GRPOTrainer, "_generate_and_score_completions", seen)
            trained.train_loader = iter(trained.get_train_dataloader())
            return trained._generate_and_score_completions(next(trained.train_loader))

    output = with_pixels(change=False)
    assert output["pixel_values"].shape == (10, 2)
    assert bool(output[KEPT].all())
    with pytest.raises(CapabilityError, match="would mix the images of two rounds: pixel_values differs"):
        with_pixels(change=True)


def returned(logprobs: Any) -> Any:
    plain = tiny.fixed_rollout({})

    def rollout(batch: list[str], trainer: Any) -> dict[str, Any]:
        found = plain(batch, trainer)
        found["logprobs"] = logprobs and [[-3.0] * len(ids) for ids in found["completion_ids"]]
        return found

    return rollout


@pytest.mark.parametrize(
    ("objective", "options", "reason"),
    [
        ("gdpo", {"top_p": 0.5}, "with top_p = 0.5"),
        ("gdpo", {"generation_kwargs": {"typical_p": 0.3}}, "with typical_p = 0.3"),
        (Objective(estimator=GRPO(), correction=ImportanceCorrection()), {}, "with a correction"),
    ],
)
def test_a_sampler_that_owes_logprobs_is_asked_for_them(
    objective: Any, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(objective, extra={"rollout_func": returned(True)}, max_steps=1, **options)
    assert history(trained, "window/sequences") == [8.0]
    with pytest.raises(CapabilityError, match=rf"logprobs = None, but {reason}"):
        train(objective, extra={"rollout_func": returned(None)}, max_steps=1, **options)


def test_noise_on_the_embeddings_is_said() -> None:
    config = GRPOConfig(**tiny.options(neftune_noise_alpha=5.0))
    with pytest.warns(UserWarning, match="neftune_noise_alpha = 5.0"):
        tiny.trainer(ObjectiveGRPOTrainer, config, objective="gdpo")
    with pytest.raises(CapabilityError, match="neftune_noise_alpha = 5.0"):
        tiny.trainer(ObjectiveGRPOTrainer, config, objective="p3o")


def test_a_step_without_any_signal_is_skipped() -> None:
    config = tiny.options(max_steps=1, dynamic_sampling="drop", weight_decay=0.5)
    trained = tiny.trainer(
        ObjectiveGRPOTrainer,
        ObjectiveConfig(**config),
        objective=GRPO_TRL,
        reward_funcs=[lambda completions, **_: [1.0] * len(completions)],
    )
    before = tiny.parameters(trained)
    trained.train()
    assert torch.equal(before, tiny.parameters(trained))
    assert history(trained, "window/skipped") == [1.0]


def test_the_log_is_honest() -> None:
    """Under GDPO one reward may vary while the other is constant; TRL's own fraction looks at the batch."""

    def constant(completions: list[str], **_: Any) -> list[float]:
        return [0.5] * len(completions)

    trained = train("gdpo", extra={"reward_funcs": [constant, dead_at_first(9)]}, max_steps=1)
    assert history(trained, "frac_reward_zero_std") == [0.5]
    assert history(trained, "reward/constant_group_fraction") == [0.5]
    assert history(trained, "reward/constant/constant_group_fraction") == [1.0]
    assert history(trained, "group/zero_advantage_fraction") == [0.5]
    assert history(trained, "response/length_max")
    dead = history(trained, "advantage/zero_fraction")
    assert 0.0 < dead[0] < 1.0
    assert dead == pytest.approx(history(trained, "group/no_signal_token_fraction"))
    signs = [history(trained, f"advantage/{sign}_fraction")[0] for sign in ("positive", "negative")]
    assert sum(signs) + dead[0] == pytest.approx(1.0)
    assert history(trained, "advantage/lowest")[0] < 0.0 < history(trained, "advantage/highest")[0]
    assert not history(trained, "group/dropped_fraction"), "sampling/… says what was dropped, where it is"
    assert history(trained, "loss")[0] == pytest.approx(history(trained, "loss/total")[0], abs=1e-4)
    unknown = {
        name
        for entry in trained.state.log_history
        for name in entry
        if name.startswith(("policy/", "loss/", "advantage/"))
    } - {f"{name}{tail}" for name in trained.objective.declared_metrics() for tail in ("", "mean", "std")}
    assert not unknown


def test_groups_are_judged_with_the_estimators_weights() -> None:
    """Rewards that sum up to the same for every answer differ once they are weighed."""

    def first(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(row % 2) for row in range(len(completion_ids))]

    def second(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(row % 2 == 0) for row in range(len(completion_ids))]

    objective = Objective(estimator=GRPO(weights=(1.0, 0.5)))
    trained = train(objective, extra={"reward_funcs": [first, second]}, max_steps=1)
    assert history(trained, "group/zero_advantage_fraction") == [0.0]
    assert history(trained, "group/no_signal_token_fraction") == [0.0]
    assert history(trained, "group/advantage_abs_mean")[0] > 0.0
    assert history(trained, "reward") == [0.75]


def test_truncated_completions_keep_their_length_in_the_log() -> None:
    plain, masked = (
        train("grpo", max_steps=1, mask_truncated_completions=flag, extra={"reward_funcs": [tiny.even]})
        for flag in (False, True)
    )
    for name in (
        "response/length_mean",
        "response/length_max",
        "response/correct_length_mean",
        "group/empty_response_fraction",
    ):
        assert history(masked, name) == history(plain, name), name
    assert history(masked, "response/length_mean") == history(masked, "completions/mean_length")
    assert history(masked, "window/tokens")[0] < history(plain, "window/tokens")[0]


def test_a_batch_baseline_keeps_groups_of_equal_rewards() -> None:
    """Groups play no part in it, so a constant one is no reason to drop anything."""

    def by_prompt(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(row // tiny.GROUP % 2) for row in range(len(completion_ids))]

    trained = train(
        Objective(estimator=BatchBaseline()),
        ObjectiveConfig,
        extra={"reward_funcs": [by_prompt]},
        max_steps=1,
        dynamic_sampling="drop",
    )
    assert history(trained, "window/skipped") == [0.0]
    assert history(trained, "advantage/abs_mean") == [0.5]
    assert history(trained, "sampling/dropped_group_fraction") == [0.0]
    assert not history(trained, "group/zero_advantage_fraction")


def test_metrics_are_weighted_over_the_steps_of_a_log_line() -> None:
    each = train("gdpo", logging_steps=1, max_steps=2, learning_rate=0.0)
    both = train("gdpo", logging_steps=2, max_steps=2, learning_rate=0.0)
    tokens, entropy = history(each, "window/tokens"), history(each, "policy/entropy")
    assert tokens[0] != tokens[1]
    weighted = sum(t * e for t, e in zip(tokens, entropy, strict=True)) / sum(tokens)
    assert history(both, "policy/entropy")[0] == pytest.approx(weighted, rel=1e-6)


def test_reference_policy_without_beta() -> None:
    """A `kl` of the objective makes TRL build the reference model."""
    objective = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.05, estimator="k2"))
    trained = train(objective, extra={"model": tiny.saved()}, max_steps=2)
    assert trained.ref_model is not None
    kl = history(trained, "policy/kl_to_ref")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-6


def test_the_reference_divergence_is_reported_where_the_rewards_charge_it() -> None:
    trained = train("reinforce_pp", extra={"model": tiny.saved()}, max_steps=2)
    kl = history(trained, "policy/kl_to_ref")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-6
    assert not history(trained, "loss/kl")


def test_the_combined_reward_is_logged_with_its_weights() -> None:
    weights = {"even": 2.0, "short": 0.0}
    trained = train({"name": "grpo", "estimator": {"weights": weights}}, max_steps=1)
    (mean,), (single,) = history(trained, "reward/mean"), history(trained, "reward/even/mean")
    assert single > 0.0
    assert mean == pytest.approx(2.0 * single, rel=1e-6)


def test_entropy_bonus_has_a_gradient() -> None:
    if "entropy_coef" not in GRPOConfig.__dataclass_fields__:
        pytest.skip("needs TRL 1.8")
    flat = Objective(estimator=lambda rollouts: 0.0 * rollouts.rewards[:, 0], entropy_coef=1.0)
    trained = train(flat, max_steps=2, learning_rate=1.0)
    first, second = history(trained, "policy/entropy")
    assert second > first - 0.05
    assert (
        float(
            (
                tiny.parameters(trained)
                - tiny.parameters(tiny.trainer(GRPOTrainer, GRPOConfig(**tiny.options())))
            )
            .abs()
            .max()
        )
        > 1e-4
    )


def test_active_dropout_is_said() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tiny.trainer(
            ObjectiveGRPOTrainer,
            GRPOConfig(**tiny.options()),
            objective="gdpo",
            model=tiny.model(attention_dropout=0.1),
        )
    assert any("disable_dropout=True" in str(one.message) for one in said)


def test_completions_table_has_our_advantages(tmp_path: Path) -> None:
    trained = train(
        "gdpo", max_steps=1, log_completions=True, output_dir=str(tmp_path), num_completions_to_print=0
    )
    logged = torch.tensor(list(trained._logs["advantages"]))
    assert logged.shape == (8,)
    assert logged.view(-1, tiny.GROUP).sum(1).abs().max() < 1e-3


def test_a_prepass_with_dropout_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"dropout = 0\.1"):
        tiny.trainer(
            ObjectiveGRPOTrainer,
            GRPOConfig(**tiny.options()),
            objective="p3o",
            model=tiny.model(attention_dropout=0.1),
        )


def test_a_function_of_tokens_is_told_how_to_say_so() -> None:
    def signs(rollouts: Rollouts) -> torch.Tensor:
        return rollouts.tokens("signs").mask.double()

    with pytest.raises(
        ShapeError, match=r"signs returned \[8, .*FunctionEstimator\(function=signs, token_level=True\)"
    ):
        train(Objective(estimator=signs), max_steps=1)
    with pytest.raises(ShapeError, match=r"one number per sequence\.$"):
        train(Objective(estimator=lambda rollouts: rollouts.rewards), max_steps=1)
    said = train(Objective(estimator=FunctionEstimator(function=signs, token_level=True)), max_steps=1)
    assert history(said, "advantage/abs_mean") == [1.0]
