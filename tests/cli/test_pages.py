"""Every YAML of README.md, docs/ and examples/ is one that the command takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  # its log handler keeps the stream it finds, which must outlive a test
import pytest
import yaml

from rlobjectives.cli import main, training
from tests.causal_lm.small_model import ROWS, save_small_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{page.name}:{text[: found.start()].count(chr(10)) + 1}": found[1]
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for found in BLOCK.finditer(text)
}
OWN = [place for place, text in BLOCKS.items() if "model" in yaml.safe_load(text)]
"""Blocks for this command; those for TRL's scripts are in tests/integrations/trl/test_pages.py."""
REWARDS = [f"tests.causal_lm.small_model.{name}" for name in ("long_answer", "has_digit")]
TINY = [
    "--trainer.devices=1",
    "--trainer.strategy=auto",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
]


class Checked(training.ObjectiveCLI):
    """The command up to the first step, or, where `parse_only`, up to the first class."""

    parse_only = False

    def instantiate_classes(self) -> None:
        if not self.parse_only:
            super().instantiate_classes()

    def _add_configure_optimizers_method_to_model(self, *args: Any) -> None:
        if not self.parse_only:
            super()._add_configure_optimizers_method_to_model(*args)

    def _run_subcommand(self, subcommand: str) -> None:
        if not self.parse_only:
            self.before_fit()


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training, "ObjectiveCLI", Checked)
    monkeypatch.setattr(sys, "argv", ["rlobjectives"])
    monkeypatch.chdir(tmp_path)


def files(place: str) -> list[str]:
    """The block as a file; behind a whole configuration where it is a piece of one."""
    text = BLOCKS[place]
    whole = {"data", "trainer"} <= yaml.safe_load(text).keys()
    found = []
    if not whole:
        readme = next(text for place, text in BLOCKS.items() if place.startswith("README"))
        Path("whole.yaml").write_text(readme)
        found.append("--config=whole.yaml")
    Path("block.yaml").write_text(text)
    return [*found, "--config=block.yaml"]


def test_there_are_some() -> None:
    assert any(place.startswith("README") for place in OWN) and len(OWN) >= 2


@pytest.mark.parametrize("place", OWN)
def test_the_command_parses_it_as_it_stands(place: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Checked, "parse_only", True)
    assert main(["fit", *files(place)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("place", OWN)
def test_it_stands_before_its_first_step(place: str, tmp_path: Path, capsys: Any) -> None:
    """With a small model, rewards and prompts in place of the reader's."""
    Path("rows.yaml").write_text(
        yaml.safe_dump(
            {"data": {"init_args": {"dataset": [*ROWS[:32]]}}, "model": {"init_args": {"rewards": REWARDS}}}
        )
    )
    tiny = [
        f"--model.init_args.model_name_or_path={save_small_model(tmp_path / 'model')}",
        "--model.init_args.max_new_tokens=8",
    ]
    objective = ["--model.init_args.objective=p3o"] if "snapshots" in BLOCKS[place] else []
    command = ["fit", *files(place), "--config=rows.yaml", *tiny, *objective, *TINY]
    assert main(command) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_command_parses_the_example(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Checked, "parse_only", True)
    assert main(["fit", f"--config={path}"]) == 0, capsys.readouterr().err


def test_every_other_block_is_one_of_trl_s() -> None:
    for place, text in BLOCKS.items():
        if place not in OWN:
            assert "objective" in yaml.safe_load(text), f"{place}: no test reads this block"
