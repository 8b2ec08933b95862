"""A column of numbers in the prompts' data becomes a column per sequence of the rollout."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import torch

from rlobjectives import MissingColumnError
from rlobjectives.causal_lm import PromptBatch
from tests.causal_lm.small_model import policy, save_small_model
from tests.own_columns import OBJECTIVE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_model(tmp_path_factory.mktemp("model"))


def rollout(folder: str, *scores: Any) -> Any:
    rows = [{"prompt": "1+1=", "answer": "2", **({} if one is None else {"score": one})} for one in scores]
    batch = PromptBatch(rows, prompt_column="prompt", ids=[*range(len(rows))], num_generations=3)
    return policy(folder, objective=OBJECTIVE).rollout(batch)


def test_one_number_per_completion(folder: str) -> None:
    found = rollout(folder, 0.5, 2)
    assert found.extra["score"].tolist() == [0.5] * 3 + [2.0] * 3
    assert "confidence" not in found.extra  # per token: a subclass adds it
    assert torch.equal(found.rows([4]).extra["score"], torch.tensor([2.0]))


def test_data_without_it_are_left_to_the_part_that_misses_it(folder: str) -> None:
    assert rollout(folder, None).extra == {}


@pytest.mark.parametrize("odd", ["high", True, [0.5]])
def test_what_is_no_number_is_refused(folder: str, odd: Any) -> None:
    with pytest.raises(
        MissingColumnError, match="own reads score, and a prompt's row has .* expected one number per prompt"
    ):
        rollout(folder, odd)
