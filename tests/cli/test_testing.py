"""``rlobjectives test`` with the built-in modules: the metrics of validation, on another set of prompts."""

from __future__ import annotations

import sys

import lightning.pytorch  # noqa: F401  # its log handler keeps the stream it finds, which must outlive a test
import pytest
import yaml

from rlobjectives.cli import main
from tests.causal_lm.small_model import ROWS, save_small_model
from tests.cli.test_configuration import CONFIG


@pytest.fixture
def config(tmp_path, monkeypatch):
    objective = {"estimator": {"class_path": "GRPO"}}
    options = {
        "objective": objective,
        "rewards": ["tests.causal_lm.small_model.long_answer"],
        "model_name_or_path": save_small_model(tmp_path / "model"),
        "max_new_tokens": 3,
        "val_samples": 2,
    }
    data = {"dataset": ROWS[:4], "test_dataset": ROWS[4:9], "prompts_per_step": 2, "val_batch_size": 3}
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"class_path": "CausalLMPolicy", "init_args": options},
                "data": {"class_path": "PromptDataModule", "init_args": data},
                "trainer": {**CONFIG["trainer"], "default_root_dir": str(tmp_path)},
            }
        )
    )
    monkeypatch.setattr(sys, "argv", ["rlobjectives"])
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_test_set_is_measured_without_training(config, capsys):
    assert main(["test", "--config", config]) == 0
    text = capsys.readouterr().out
    for name in ("test/accuracy", "test/long_answer", "test/sampled/accuracy", "test/sampled/long_answer"):
        assert name in text
    assert "val/" not in text


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_without_a_test_set_there_is_one_message(config, capsys):
    assert main(["test", "--config", config, "--data.init_args.test_dataset=null"]) == 2
    assert "Give test_dataset" in capsys.readouterr().err
