"""What replacing TRL's loss would drop, offered through our parts: the numbers of stock TRL where scopes agree."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from packaging.version import Version
from torch import Tensor
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from rlobjectives import (
    GRPO,
    OPSM,
    CapabilityError,
    Combined,
    EntropyMask,
    Objective,
    Rollouts,
    SequenceMean,
    TeacherSignal,
    TokenMean,
)
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer
from rlobjectives.integrations.trl.columns import forward, scoring_parameters
from tests.integrations.trl import tiny

FIELDS = {one.name for one in dataclasses.fields(GRPOConfig)}
TOKEN_MEAN = {"name": "dapo", "estimator": {"epsilon": 1e-4}, "policy_loss": {"clip_high": 0.2}}


def run(kind: type, options: dict[str, Any], **extra: Any) -> Any:
    trained = tiny.trainer(kind, GRPOConfig(**tiny.options(**options)), **extra)
    trained.start = tiny.parameters(trained)
    trained.train()
    return trained


def gap(left: Any, right: Any) -> float:
    return float((tiny.parameters(left) - tiny.parameters(right)).abs().max())


def moved(trained: Any) -> float:
    return float((tiny.parameters(trained) - trained.start).abs().max())


def needs(*names: str) -> None:
    if missing := sorted(set(names) - FIELDS):
        pytest.skip(f"this TRL has no {missing}")


def with_column(name: str, column: Any) -> Any:
    """The fixed rollout with one more column per completion."""
    plain = tiny.fixed_rollout({})

    def rollout(batch: list[str], trainer: Any) -> dict[str, Any]:
        found = plain(batch, trainer)
        found[name] = [column(ids) for ids in found["completion_ids"]]
        return found

    return rollout


def every_third(ids: list[int]) -> list[int]:
    return [int(place % 3 != 1) for place in range(len(ids))]


def test_tokens_of_a_tool_carry_no_loss() -> None:
    cut = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 2}
    theirs = run(GRPOTrainer, {**cut, "loss_type": "dapo"}, rollout_func=with_column("env_mask", every_third))
    ours = run(
        ObjectiveGRPOTrainer, cut, objective=TOKEN_MEAN, rollout_func=with_column("env_mask", every_third)
    )
    assert gap(theirs, ours) <= 1e-6
    assert gap(ours, run(ObjectiveGRPOTrainer, cut, objective=TOKEN_MEAN)) > 1e-3


def test_tokens_of_a_tool_are_no_part_of_a_response() -> None:
    """Of truncated completions neither, whose masks are zeroed before anybody counts."""
    lengths = []
    for masked in (False, True):
        options = {"max_steps": 1, "mask_truncated_completions": masked}
        trained = run(
            ObjectiveGRPOTrainer,
            options,
            objective=TOKEN_MEAN,
            rollout_func=with_column("env_mask", every_third),
        )
        (logged,) = (entry for entry in trained.state.log_history if "response/length_mean" in entry)
        assert logged["response/length_mean"] == logged["completions/mean_length"]
        lengths.append({name: value for name, value in logged.items() if name.startswith("response/length_")})
    assert lengths[0] == lengths[1]


def teacher(ids: list[int]) -> list[float]:
    return [-0.1 * (token % 7) - 0.5 for token in ids]


WITH_TEACHER = Objective(
    estimator=Combined(estimators=(GRPO(epsilon=1e-4), TeacherSignal(coef=0.3))), reduction=TokenMean()
)


def test_a_teacher_speaks_through_the_sampler() -> None:
    """Outcome reward and per-token teacher signal, each normalised on its own, the same for any cut."""
    seen: list[Rollouts] = []
    estimate = Combined.estimate

    def looking(part: Combined, rollouts: Rollouts) -> Tensor:
        seen.append(rollouts)
        return estimate(part, rollouts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Combined, "estimate", looking)
        rollout = with_column("teacher_logprobs", teacher)
        whole = run(ObjectiveGRPOTrainer, {"max_steps": 2}, objective=WITH_TEACHER, rollout_func=rollout)
    cut = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 2}
    rollout = with_column("teacher_logprobs", teacher)
    assert gap(whole, run(ObjectiveGRPOTrainer, cut, objective=WITH_TEACHER, rollout_func=rollout)) <= 2e-6
    alone = run(ObjectiveGRPOTrainer, {"max_steps": 2}, objective=TOKEN_MEAN)
    assert gap(whole, alone) > 1e-3
    shown = {"max_steps": 1, "log_completions": True}  # the table has one number per completion
    run(ObjectiveGRPOTrainer, shown, objective=WITH_TEACHER, rollout_func=rollout)
    # Each token's teacher is its own, and the student's log-probability stands beside it.
    given = seen[-1]  # the first ones are made up, to see what is missing
    mask = given.tokens("The test").mask
    tens = (-10.0 * (given.teacher_logprobs[mask] + 0.5)).round()
    assert torch.allclose(given.teacher_logprobs[mask], -0.1 * tens - 0.5)
    assert given.old_logprobs is not None


def test_a_teacher_that_says_nothing_is_refused() -> None:
    with pytest.raises(CapabilityError, match="Give a teacher"):
        tiny.trainer(
            ObjectiveGRPOTrainer, GRPOConfig(**tiny.options()), objective=WITH_TEACHER, generated=True
        )
    with pytest.raises(
        CapabilityError, match=r"completion 0 came with none\. Let rollout_func return .teacher_logprobs."
    ):
        run(ObjectiveGRPOTrainer, {"max_steps": 1}, objective=WITH_TEACHER)
    short = with_column("teacher_logprobs", lambda ids: teacher(ids)[1:])
    with pytest.raises(CapabilityError, match="came with 2 numbers"):
        run(ObjectiveGRPOTrainer, {"max_steps": 1}, objective=WITH_TEACHER, rollout_func=short)


def test_truncated_completions_leave_both_sums() -> None:
    cut = {"mask_truncated_completions": True, "max_steps": 2}
    theirs = run(GRPOTrainer, {**cut, "loss_type": "dapo"})
    ours = run(ObjectiveGRPOTrainer, cut, objective=TOKEN_MEAN)
    if Version(metadata.version("trl")) < Version("1.9"):
        assert gap(theirs, ours) > 1e-3, "stock still divides by the tokens it has left out"
    else:
        assert gap(theirs, ours) <= 1e-6
    without = run(ObjectiveGRPOTrainer, {"max_steps": 2}, objective=TOKEN_MEAN)
    assert gap(ours, without) > 1e-3
    tokens = [one.state.log_history[0]["window/tokens"] for one in (ours, without)]
    assert 0 < tokens[0] < tokens[1]


def test_the_quantile_of_entropy_is_that_of_the_window() -> None:
    """In one micro-batch it is TRL's; TRL's changes with the cut."""
    objective = Objective(estimator=GRPO(epsilon=1e-4), entropy_mask=EntropyMask(fraction=0.5))
    cuts = [
        {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps, "max_steps": 1}
        for steps in (1, 4)
    ]
    theirs = [run(GRPOTrainer, {**cut, "loss_type": "dapo", "top_entropy_quantile": 0.5}) for cut in cuts]
    ours = [run(ObjectiveGRPOTrainer, cut, objective=objective) for cut in cuts]
    assert gap(theirs[0], ours[0]) <= 1e-6
    assert gap(*ours) <= 2e-6
    assert gap(*theirs) > 1e-3


def test_the_entropy_bonus_is_weighted_like_the_loss() -> None:
    needs("entropy_coef")
    objective = Objective(estimator=GRPO(epsilon=1e-4), entropy_coef=0.3)
    cuts = [
        {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps, "max_steps": 1}
        for steps in (1, 4)
    ]
    theirs = [run(GRPOTrainer, {**cut, "loss_type": "dapo", "entropy_coef": 0.3}) for cut in cuts]
    ours = [run(ObjectiveGRPOTrainer, cut, objective=objective) for cut in cuts]
    assert gap(theirs[0], ours[0]) <= 1e-6
    assert gap(*ours) <= 2e-6
    assert gap(*theirs) > 1e-4
    assert gap(ours[0], run(ObjectiveGRPOTrainer, cuts[0], objective=TOKEN_MEAN)) > 1e-4


def likely(ids: list[int]) -> list[float]:
    return [-3.2 + 0.1 * (token % 3) for token in ids]


def test_the_off_policy_mask_reads_the_samplers_logprobs() -> None:
    needs("off_policy_mask_threshold")
    cut = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
    sampler = {"rollout_func": with_column("logprobs", likely)}
    theirs = run(GRPOTrainer, {**cut, "loss_type": "grpo", "off_policy_mask_threshold": 0.35}, **sampler)
    objective = Objective(
        estimator=GRPO(epsilon=1e-4),
        reduction=SequenceMean(),
        off_policy_mask=OPSM(threshold=0.35, against="behavior"),
    )
    sampler = {"rollout_func": with_column("logprobs", likely)}
    ours = run(ObjectiveGRPOTrainer, cut, objective=objective, **sampler)
    assert gap(theirs, ours) <= 1e-6
    dropped = [entry["opsm/dropped_fraction"] for entry in ours.state.log_history if "loss/total" in entry]
    assert all(0.0 < share < 1.0 for share in dropped)


def experts() -> Qwen2MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
    )
    built = Qwen2MoeForCausalLM(config)
    built.warnings_issued = {}
    return built


def test_the_load_balancing_loss_of_experts_is_added() -> None:
    needs("router_aux_loss_coef")
    cut = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "router_aux_loss_coef": 0.3,
    }
    theirs = run(GRPOTrainer, {**cut, "loss_type": "dapo"}, model=experts())
    ours = run(ObjectiveGRPOTrainer, cut, objective=TOKEN_MEAN, model=experts())
    assert gap(theirs, ours) <= 1e-6
    logged = [one.state.log_history[0]["aux_loss"] for one in (theirs, ours)]
    assert logged[1] == pytest.approx(logged[0], rel=1e-6)
    off = run(
        ObjectiveGRPOTrainer, {**cut, "router_aux_loss_coef": 0.0}, objective=TOKEN_MEAN, model=experts()
    )
    assert gap(ours, off) > 1e-4


def test_low_precision_forwards_follow_stock() -> None:
    """Losses are float32 whatever autocast does, so only the rounding of the forward is left."""
    full = run(ObjectiveGRPOTrainer, {"max_steps": 2, "learning_rate": 0.1}, objective=TOKEN_MEAN)
    options = {"bf16": True, "max_steps": 2, "learning_rate": 0.1}
    theirs = run(GRPOTrainer, {**options, "loss_type": "dapo"})
    ours = run(ObjectiveGRPOTrainer, options, objective=TOKEN_MEAN)
    assert moved(ours) > 1e-3
    assert gap(theirs, ours) <= 0.02 * moved(ours)
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in ours.state.log_history[:2])
    assert gap(ours, full) > 0.0


def test_checkpointed_layers_follow_stock() -> None:
    plain = run(ObjectiveGRPOTrainer, {"max_steps": 2}, objective="gdpo")
    again = run(ObjectiveGRPOTrainer, {"max_steps": 2, "gradient_checkpointing": True}, objective="gdpo")
    assert gap(plain, again) <= 1e-6
    assert moved(again) > 1e-3


# Whatever else TRL puts into a batch


OURS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages",
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps",
}  # fmt: skip
"""Columns the adapter reads by name."""
UNUSED = {
    "num_items_in_batch",  # the generation batch's token count; a window counts its own
    "importance_sampling_ratio",  # TRL's vLLM correction; refused without ImportanceCorrection, which reads logprobs
    "old_logps",  # RLOOTrainer's sums over a sequence; tokens' own are computed where something reads them
}


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_every_column_of_a_batch_is_read_or_passed_on(kind: Any) -> None:
    source = textwrap.dedent(inspect.getsource(kind._generate_and_score_completions))
    columns: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign):
            continue
        (target,) = node.targets[:1]
        if isinstance(target, ast.Name) and target.id == "output" and isinstance(node.value, ast.Dict):
            columns |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
        if (
            isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Name)
            and target.value.id == "output"
        ):
            assert isinstance(target.slice, ast.Constant)
            columns.add(target.slice.value)
    assert {"completion_ids", "advantages", "pixel_values"} <= columns
    passed_on = set(scoring_parameters(kind))
    assert columns - OURS - UNUSED <= passed_on, "new columns of TRL: say what becomes of them"


def test_what_else_a_model_reads_is_passed_on() -> None:
    """Pixels and the like go to the forward under TRL's names; what this TRL does not take is left out."""
    seen: dict[str, Any] = {}

    def compute(
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        pixel_values: Tensor | None = None,
        num_images: list[int] | None = None,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        seen.update(pixel_values=pixel_values, num_images=num_images, token_type_ids=token_type_ids)
        seen.update(width=logits_to_keep, shape=tuple(input_ids.shape), batch_size=batch_size)
        return torch.zeros(input_ids.shape[0], logits_to_keep), None

    ones = torch.ones(2, 3, dtype=torch.long)
    pixels, kinds = torch.rand(2, 5), torch.zeros(2, 6)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": ones,
        "completion_mask": ones,
        "pixel_values": pixels,
        "num_images": [1, 1],
        "token_type_ids": kinds,
        "image_sizes": torch.ones(2, 2),
        "input_ids": torch.zeros(9, 9),  # must not take the place of the sequences
    }

    class Wrapped:
        """A hook that passes everything on, as in TRL 1.14."""

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return compute(model, *args, **kwargs)

        _full_logits_logps = staticmethod(compute)

    for trainer in (SimpleNamespace(_get_per_token_logps_and_entropies=compute), Wrapped()):
        seen.clear()
        logprobs, entropy, aux = forward(trainer, None, inputs, entropy=False, batch_size=7)
        assert logprobs.shape == (2, 3)
        assert entropy is None and aux is None
        assert seen["pixel_values"] is pixels and seen["token_type_ids"] is kinds
        assert seen["num_images"] == [1, 1]
        assert (seen["width"], seen["shape"], seen["batch_size"]) == (3, (2, 6), 7)
    del Wrapped._full_logits_logps
    with pytest.raises(CapabilityError, match="takes any keyword"):
        forward(Wrapped(), None, inputs, entropy=False)


@pytest.mark.parametrize("name", ["luspo", "dr_grpo"])
def test_the_factor_between_the_two_entropy_bonuses(name: str) -> None:
    """TRL's is a mean per token; ours is weighted by the reduction: times tokens per completion, or that over a budget."""
    needs("entropy_coef")
    usual = {"max_steps": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    given = {**usual, "loss_type": name}
    if name == "luspo":
        given["importance_sampling_level"] = "sequence"
    estimator = {"epsilon": 1e-4, "scale": "group"}
    length = GRPOConfig(**tiny.options()).max_completion_length
    plain = run(ObjectiveGRPOTrainer, usual, objective={"name": name, "estimator": estimator})
    (logged,) = (entry for entry in plain.state.log_history if "response/length_mean" in entry)
    tokens = logged["response/length_mean"]
    ratio = tokens if name == "luspo" else tokens / length
    theirs = run(GRPOTrainer, {**given, "entropy_coef": 0.3})
    ours = run(
        ObjectiveGRPOTrainer,
        usual,
        objective={"name": name, "estimator": estimator, "entropy_coef": 0.3 / ratio},
    )
    assert gap(theirs, ours) <= 2e-6
    same = run(
        ObjectiveGRPOTrainer, usual, objective={"name": name, "estimator": estimator, "entropy_coef": 0.3}
    )
    assert gap(theirs, same) > 1e-4
