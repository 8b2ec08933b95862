"""docs/extending.md, typed in from top to bottom: its files are written, its sessions print what it says, its YAML runs."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs/extending.md"
LONGEST = 26


def files() -> dict[str, list[str]]:
    """The Python blocks by the file that their first line names."""
    found: dict[str, list[str]] = {}
    for block in blocks(PAGE):
        if block.language == "python":
            found.setdefault(block.body.splitlines()[0].removeprefix("# "), []).append(block.body)
    return found


def lines(body: str) -> list[str]:
    return [line for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, from which they are imported."""
    for name, bodies in files().items():
        (tmp_path / name).write_text("\n\n".join(bodies))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in files():
        sys.modules.pop(name.removesuffix(".py"), None)


def arguments() -> dict[str, Any]:
    (found,) = (block.body for block in blocks(PAGE) if block.language == "yaml")
    read: dict[str, Any] = yaml.safe_load(found)
    return read


def test_every_part_is_short() -> None:
    parts = files()["my_parts.py"]
    assert len(parts) >= 8
    assert max(len(lines(body)) for body in parts) <= LONGEST


def test_sessions_print_what_the_page_says(folder: Path) -> None:
    names: dict[str, Any] = {"torch": torch}
    for block in blocks(PAGE):
        if block.language == "pycon":
            test = doctest.DocTestParser().get_doctest(block.body, names, block.place, str(PAGE), block.line)
            said: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, out=said.append, clear_globs=False)
            names = test.globs
            assert not runner.failures, "".join(said)


def test_its_parts_run_in_a_yaml_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    from rlobjectives.cli import main
    from tests.cli.test_configuration import CONFIG

    policy: Any = CONFIG["model"]
    model = {**policy, "init_args": {**arguments(), "out": str(folder / "weights.pt"), "micro_batch_size": 2}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "model": model}))
    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert torch.load(folder / "weights.pt").isfinite().all()


def test_its_parts_run_in_trl(folder: Path) -> None:
    pytest.importorskip("trl")
    from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
    from tests.integrations.trl import tiny

    run = tiny.trainer(ObjectiveGRPOTrainer, ObjectiveConfig(**tiny.options(**arguments(), max_steps=1)))
    run.train()
    assert {"loss/confidence", "policy/surprise", "certain/dropped"} < run.state.log_history[0].keys()
