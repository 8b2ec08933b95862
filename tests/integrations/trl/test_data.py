"""Data that TRL cannot train on are refused in words, and a run without a step does not end as if it had trained."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

from datasets import Dataset, IterableDataset

from rlobjectives import CapabilityError, MissingColumnError
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny

QUESTIONS = {"question": ["w1 w2"] * 8, "answer": ["w3"] * 8}


def trainer(train: Any, evaluation: Any = None, **options: Any) -> Any:
    config = ObjectiveConfig(**tiny.options(objective="grpo", **options))
    return tiny.trainer(ObjectiveGRPOTrainer, config, train_dataset=train, eval_dataset=evaluation)


def stream(*rows: dict[str, str]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def test_rows_without_a_prompt_are_refused_at_construction() -> None:
    questions = Dataset.from_dict(QUESTIONS)
    with pytest.raises(
        MissingColumnError, match="train_dataset has no column 'prompt'.*it has question, answer"
    ):
        trainer(questions)
    for evaluation in (questions, {"first": tiny.prompts(), "second": questions}):
        with pytest.raises(MissingColumnError, match="eval_dataset has no column 'prompt'"):
            trainer(tiny.prompts(), evaluation, eval_strategy="steps", eval_steps=1)


def test_a_stream_without_a_prompt_is_refused_at_its_first_batch() -> None:
    rows = [{"question": f"w{row}"} for row in range(8)]
    with pytest.raises(MissingColumnError, match=r"a batch has no column 'prompt'.*it has question"):
        trainer(stream(*rows)).train()


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (Dataset.from_dict({"prompt": []}), "0 prompts"),
        (tiny.prompts(1), "1 prompts"),
        (stream(), "too few prompts"),
        (stream({"prompt": "w1"}), "too few prompts"),
    ],
    ids=["none", "one", "an empty stream", "a short stream"],
)
def test_too_few_prompts_for_a_step_are_an_error(data: Any, count: str) -> None:
    with pytest.raises(
        CapabilityError, match=f"train_dataset has {count}, and a generation batch takes 2 .*not one step"
    ):
        trainer(data).train()


def test_a_stream_that_ends_early_has_trained() -> None:
    run = trainer(stream(*({"prompt": f"w{row} w1"} for row in range(4))), max_steps=9)
    run.train()
    assert run.state.global_step >= 1
