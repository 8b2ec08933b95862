"""The configurations of examples, documentation and tests, read by the parsers that users' files go through."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from rlobjectives import Component, Objective

ROOT = Path(__file__).resolve().parent.parent

REQUIRED: Mapping[str, Mapping[str, Any]] = {"dr_grpo": {"reduction": {"max_tokens": 8}}}
"""Overrides of registered objectives that have an option without a default."""

Told = dict[str, dict[str, str]]
"""Class and options of each part of an objective, as text."""

OWN = "my_parts:"
"""A reader's own file, whose parts `tests/test_extending.py` writes and runs."""
_BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OBJECTIVES: tuple[Mapping[str, Any], ...] = (
    {
        "estimator": {"class_path": "GDPO", "init_args": {"weights": [1.0, 0.5]}},
        "reduction": {"class_path": "TokenMean"},
        "kl": {"coef": 0.1},
    },
    {"estimator": {"class_path": "GRPO"}},
    {"estimator": {"class_path": "GRPO"}, "policy_loss": {"class_path": "GSPO"}},
    {"estimator": {"class_path": "GRPO"}, "correction": {"reject": [{"over": "sum", "high": 2.0}]}},
    {"estimator": {"class_path": "rlobjectives.estimators.GRPO"}, "entropy_coef": 0.01, "name": "mine"},
    {
        "estimator": {
            "class_path": "Combined",
            "init_args": {
                "estimators": [
                    {"class_path": "rlobjectives.GRPO"},
                    {"class_path": "rlobjectives.TeacherSignal", "init_args": {"coef": 0.5}},
                ],
                "weights": [1.0, 0.5],
            },
        },
        "kl": {"class_path": "KLPenalty", "init_args": {"coef": 0.1, "estimator": "full"}},
        "correction": {"class_path": "ImportanceCorrection", "init_args": {"veto": 0.1}},
        "off_policy_mask": {"threshold": 0.5, "against": "behavior"},
        "entropy_mask": {
            "class_path": "rlobjectives.corrections.entropy_mask.EntropyMask",
            "init_args": {"fraction": 0.5},
        },
        "distillation": {"class_path": "ReverseKLDistillation", "init_args": {"coef": 0.5}},
    },
)
"""Objectives that tests of the command line write, and the spellings that they do not."""
_TRL: tuple[Mapping[str, Any], ...] = (
    {"off_policy_mask": {"threshold": 0.5, "against": "behavior"}},
    {"entropy_mask": {"fraction": 0.2}},
    {"correction": {"weight": "token", "high": 1.5}},
    {
        "correction": {
            "weight": "none",
            "reject": [{"over": "sum", "high": 2.0}, {"measure": "k2", "high": 1.0}],
        }
    },
    {
        "correction": {
            "class_path": "ImportanceCorrection",
            "init_args": {"reject": [{"over": "sum", "high": 2.0}]},
        }
    },
    {"kl": {"coef": 0.1}},
    {"off_policy_mask": "rlobjectives:OPSM"},
    {"entropy_mask": {"class_path": "rlobjectives.EntropyMask", "init_args": {"fraction": 0.3}}},
    {"reduction": {"class_path": "SequenceMean"}},
    {"estimator": "rlobjectives.estimators:RLOO"},
)
"""The same of TRL's: what ``objective_args`` says beside ``objective: grpo``."""


def files() -> dict[str, dict[str, Any]]:
    """Every configuration and the parser that it is for, by where it comes from."""
    base = _blocks(ROOT / "README.md")[0]
    lightning = {f"examples/{file.name}": _read(file) for file in sorted((ROOT / "examples").glob("*.yaml"))}
    trl: dict[str, Any] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for place, block in enumerate(_blocks(page)):
            name = f"{page.relative_to(ROOT)}, block {place}"
            if "model" in block:
                lightning[name] = _laid_over(base, block)
            elif "objective" in block:
                trl[name] = block
    for place, objective in enumerate(_OBJECTIVES):
        lightning[f"tests, {place}"] = _laid_over(base, {"model": {"init_args": {"objective": None}}})
        lightning[f"tests, {place}"]["model"]["init_args"]["objective"] = dict(objective)
    for place, overrides in enumerate(_TRL):
        trl[f"tests of TRL, {place}"] = {"objective": "grpo", "objective_args": dict(overrides)}
    found = {name: {"for": "lightning", "file": one} for name, one in lightning.items()}
    return found | {name: {"for": "trl", "file": one} for name, one in trl.items()}


def found() -> dict[str, dict[str, Any]]:
    """`files`, each with the objective that it gives."""
    return {name: {**one, "gives": told(parsed(one))} for name, one in files().items()}


def _read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _blocks(page: Path) -> list[dict[str, Any]]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [yaml.safe_load(block) for block in found if OWN not in block]


def _laid_over(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{name: _laid_over(below.get(name), one) for name, one in above.items()}}


# Reading --------------------------------------------------------------------------------------------


class _ReadError(Exception):
    """Not an error: carries the configuration out of the command line before anything is built."""


def parsed(entry: Mapping[str, Any]) -> Objective:
    """The objective of a configuration, as the parser that it is for reads it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(entry["file"]), encoding="utf-8")
        return _by_command_line(file) if entry["for"] == "lightning" else _by_trl(file)


def _by_command_line(file: Path) -> Objective:
    from jsonargparse import ArgumentParser
    from lightning.pytorch import LightningDataModule, LightningModule

    from rlobjectives.cli.training import ObjectiveCLI

    class Reader(ObjectiveCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            super().parse_arguments(parser, args)
            raise _ReadError(self.config[self.config.subcommand].model.init_args.objective)

    subparsers = {command: {"exit_on_error": False} for command in ("fit", "validate", "test")}
    try:
        # The command line wonders about arguments of the program that it is called from.
        with mock.patch.object(sys, "argv", ["rlobjectives"]):
            Reader(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                parser_kwargs={"exit_on_error": False, **subparsers},
                args=["fit", "--config", str(file)],
            )
    except _ReadError as read:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--objective", type=Objective)
        given = parser.parse_object({"objective": read.args[0]})
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # by release
        objective: Objective = instantiate(given).objective
        return objective
    raise AssertionError("the command line did not come to build anything")


def _by_trl(file: Path) -> Objective:
    from trl import ModelConfig, TrlParser

    from rlobjectives.integrations.trl import ObjectiveConfig
    from rlobjectives.integrations.trl.objective_source import as_objective

    flags = ["--output_dir", "runs", "--use_cpu", "true", "--bf16", "false"]
    parser = TrlParser((ObjectiveConfig, ModelConfig))
    config, _ = parser.parse_args_and_config(["--config", str(file), *flags])
    return as_objective({"name": config.objective, **(config.objective_args or {})}, config)


def told(objective: Objective) -> Told:
    """Class and options of every part."""
    return {role: _told(part) for role, part in objective.parts().items()} | {
        "": {"name": repr(objective.name), "entropy_coef": repr(objective.entropy_coef)}
    }


def _told(part: Component) -> dict[str, str]:
    names: list[str] = (
        [one.name for one in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    )
    return {"class": type(part).__name__, **{name: _shown(getattr(part, name)) for name in names}}


def _shown(value: object) -> str:
    if isinstance(value, tuple) and value and all(isinstance(one, Component) for one in value):
        return ", ".join(type(one).__name__ for one in value)  # which may get more options
    return repr(tuple(value) if isinstance(value, list) else value)


# Comparing ------------------------------------------------------------------------------------------


def readable(entry: Mapping[str, Any]) -> bool:
    """Whether this environment has the parser that a configuration is for."""
    return importlib.util.find_spec(entry["for"]) is not None


def lost(entry: Mapping[str, Any]) -> list[str]:
    """What of a stored configuration no longer gives the objective that it gave."""
    if not readable(entry):
        return []
    now, found = told(parsed(entry)), []
    for role, options in entry["gives"].items():
        for name, value in options.items():
            if (other := now.get(role, {}).get(name)) != value:
                found.append(f"{role or 'objective'}.{name} is {other}; it was {value}")
    return found


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old ones, and each new one under a name of its own where another stands under its."""
    both = dict(old)
    for name, entry in new.items():
        if all(entry["file"] != one["file"] for one in both.values()):
            label, number = name, 1
            while label in both:
                number += 1
                label = f"{name} ({number})"
            both[label] = entry
    return both
