"""The configurations of examples/ run as they stand, but for their size."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  # its log handler keeps the stream it finds, which must outlive a test
import pytest

pytest.importorskip("reasoning_gym")

from examples.supervised import make_mediocre_model
from rlobjectives.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "trainer.devices": 1,
    "trainer.strategy": "auto",
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 8,
    "trainer.val_check_interval": 1,
    "data.init_args.prompts_per_step": 4,
    "data.init_args.val_dataset_options": "{part: held_out, limit: 4}",
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["demo_gdpo", "p3o", "m2po", "ppo_gae"])
def test_a_configuration_trains(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlobjectives"])
    make_mediocre_model(tmp_path / "runs" / "demo" / "start", seed=0, steps=2, batch_size=4)
    overrides = [f"--{key}={value}" for key, value in SMALL.items()]
    assert main(["fit", "--config", str(EXAMPLES / f"{name}.yaml"), *overrides]) == 0, capsys.readouterr()
    (table,) = tmp_path.glob("runs/*/csv/**/metrics.csv")
    text = table.read_text()
    trains = (
        "loss/value_loss" if name == "ppo_gae" else "loss/policy"
    )  # its policy still waits for the critic
    for metric in (trains, "val/accuracy", "response/length_mean", "group/empty_response_fraction"):
        assert metric in text
