"""The small parts of the adapter by themselves."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from torch import nn

from rlobjectives import GRPO, FixedBudget, Objective, PromptMean, SequenceMean, ShapeError, TokenMean
from rlobjectives.integrations.dropout import largest_dropout
from rlobjectives.integrations.trl.columns import KEPT, token_layout
from rlobjectives.integrations.trl.rollout import global_rollouts, merge_rounds, unique_names
from rlobjectives.integrations.trl.skip import StepSkipper, forget_unscaled


def test_layout_counts_what_no_mask_excludes() -> None:
    inputs = {"completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    assert token_layout(inputs).token_counts().tolist() == [3, 2]
    inputs["tool_mask"] = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert token_layout(inputs).token_counts().tolist() == [2, 2]
    inputs[KEPT] = torch.tensor([True, False])
    layout = token_layout(inputs)
    assert layout.token_counts().tolist() == [2, 0]
    assert layout.sequence_mask().tolist() == [True, False]


def test_a_step_is_skipped_once_and_given_back() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    shadowed = dict(vars(optimizer))
    weight.grad = torch.ones(1)
    skipper = StepSkipper()
    skipper.arm(optimizer, schedule, None)
    optimizer.step()
    schedule.step()
    assert weight.item() == 1.0
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert vars(optimizer).keys() == shadowed.keys()
    optimizer.step()
    schedule.step()
    assert weight.item() == 0.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    skipper.arm(optimizer)
    skipper.disarm()  # nobody stepped in between
    optimizer.step()
    assert weight.item() == pytest.approx(-0.1)


def test_a_gradient_scaler_survives_a_skipped_step() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)  # what clipping does; no step follows
    forget_unscaled(scaler, optimizer)
    forget_unscaled(None, optimizer)
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_reward_names_stay_different_whatever_they_are() -> None:
    assert unique_names(["f", "f", "f"]) == ("f", "f_1", "f_2")
    assert unique_names(["f", "f", "f_1"]) == ("f", "f_2", "f_1")
    assert unique_names(["f_1", "f", "f", "f_1"]) == ("f_1", "f", "f_2", "f_1_1")


def test_rounds_of_different_width_merge_row_by_row() -> None:
    first: dict[str, Any] = {
        "prompt_ids": torch.tensor([[7, 8], [0, 9]]),
        "completion_ids": torch.tensor([[3, 4], [5, 0]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([0.0, 0.0], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(3),
        "num_images": [1, 1],
    }
    again = {
        **first,
        "completion_ids": torch.tensor([[6, 6, 6], [5, 5, 5]]),
        "completion_mask": torch.ones(2, 3, dtype=torch.long),
        "advantages": torch.tensor([[1.0], [2.0]], dtype=torch.float64).squeeze(1),
    }
    merged = merge_rounds(first, again, torch.tensor([False, True]), pad_token_id=0)
    assert merged["completion_ids"].tolist() == [[3, 4, 0], [5, 5, 5]]
    assert merged["completion_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert merged["advantages"].tolist() == [0.0, 2.0]
    assert merged["prompt_ids"].tolist() == first["prompt_ids"].tolist()
    assert merged["num_images"] == [1, 1]


def test_batches_that_are_not_whole_groups_are_refused() -> None:
    from types import SimpleNamespace

    layout = token_layout({"completion_mask": torch.ones(3, 2)})
    alone = SimpleNamespace(num_processes=1)
    with pytest.raises(ShapeError, match="whole groups"):
        global_rollouts(torch.zeros(3, 1), ["a"], 2, layout, alone)
    rollouts = global_rollouts(torch.tensor([[1.0], [torch.nan], [0.0]]), ["a"], 3, layout, alone)
    assert rollouts.scored.tolist() == [[True], [False], [True]]


def test_reductions_that_read_prompts_are_found() -> None:
    assert "prompt_tokens" in Objective(estimator=GRPO(), reduction=PromptMean()).reads()
    for plain in (TokenMean(), SequenceMean(), FixedBudget(max_tokens=3)):
        assert "prompt_tokens" not in Objective(estimator=GRPO(), reduction=plain).reads()


def test_dropout_is_found() -> None:
    functional = nn.Linear(1, 1)
    functional.attention_dropout = 0.3
    assert largest_dropout(nn.Sequential(nn.Dropout(0.1), functional)) == 0.3
    assert largest_dropout(nn.Sequential(nn.Dropout(0.0), nn.Linear(1, 1))) == 0.0
    assert largest_dropout(nn.Sequential(nn.AlphaDropout(0.3), nn.Dropout2d(0.1))) == 0.3
