"""The TRL blocks of README.md and docs/coming_from_trl.md run, with a tiny model in place of the reader's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig

from rlobjectives import OPSM, EntropyMask, ImportanceCorrection, KLPenalty, Rejection
from rlobjectives.integrations.trl import ObjectiveConfig
from rlobjectives.integrations.trl.objective_source import as_objective
from tests.integrations.trl import tiny

ROOT = Path(__file__).resolve().parents[3]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "coming_from_trl.md"


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [block for block in found if "trl" in block or "objective:" in block]


def correct(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def formatted(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder whose tokenizer is found by its name: transformers takes Qwen's own for any Qwen2 model."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def names(kept: list[Any], model: str) -> dict[str, Any]:
    """What a page leaves to the reader; `kept` gets every trainer that is made."""
    from rlobjectives.integrations.trl import ObjectiveMixin

    made = ObjectiveMixin._finish_setup

    def noted(self: Any) -> None:
        kept.append(self)
        made(self)

    ObjectiveMixin._finish_setup = noted  # put back by `restored`
    return {
        "model": model,
        "prompts": tiny.prompts(),
        "correct": correct,
        "formatted": formatted,
        "format": formatted,
        "config": GRPOConfig(**tiny.options(max_steps=1)),
    }


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlobjectives.integrations.trl import ObjectiveMixin

    monkeypatch.setattr(ObjectiveMixin, "_finish_setup", ObjectiveMixin._finish_setup)


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_the_first_block_trains(page: Path, model: str) -> None:
    block = next(one for one in blocks(page, "python") if "GRPOConfig(...)" in one)
    kept: list[Any] = []
    exec(compile(block.replace("GRPOConfig(...)", "config"), str(page), "exec"), names(kept, model))
    assert [one.state.global_step for one in kept] == [1]
    assert kept[0].objective.name in ("gdpo", "GDPO")


def test_the_script_reads_the_yaml(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = (one for one in blocks(PAGE, "yaml") if "model_name_or_path" in one)
    (block,) = (one for one in blocks(PAGE, "python") if "TrlParser" in one)
    options = {**tiny.options(max_steps=1), **yaml.safe_load(text), "num_generations": tiny.GROUP}
    options |= {"model_name_or_path": model, "output_dir": str(tmp_path)}
    file = tmp_path / "gdpo.yaml"
    file.write_text(yaml.safe_dump(options))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])
    kept: list[Any] = []
    exec(compile(block, str(PAGE), "exec"), names(kept, model))
    (trained,) = kept
    assert trained.state.global_step == 1
    assert trained.objective.estimator.weights == (1.0, 0.5)
    assert trained.objective.policy_loss.clip_high == 0.28
    assert (trained.dynamic_sampling, trained.max_resamples) == ("resample", 2)


def test_the_other_yaml_makes_an_objective(tmp_path: Path) -> None:
    (text,) = (one for one in blocks(PAGE, "yaml") if "model_name_or_path" not in one)
    config = ObjectiveConfig(**tiny.options(**yaml.safe_load(text)))
    made = as_objective({"name": config.objective, **config.objective_args})
    assert made.off_policy_mask == OPSM(threshold=0.5, against="behavior")
    assert made.entropy_mask == EntropyMask(fraction=0.2) and made.kl == KLPenalty(coef=0.001)
    assert made.correction == ImportanceCorrection(reject=(Rejection(over="sum", high=2.0),))
