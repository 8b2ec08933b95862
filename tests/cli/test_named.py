"""An objective by its name in a configuration is that of `Objective.named`, option for option."""

from __future__ import annotations

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule

from rlobjectives import (
    GSPO,
    CapabilityError,
    ClippedSurrogate,
    ImportanceCorrection,
    Objective,
    Rejection,
    TokenMean,
)
from rlobjectives.cli.named import names_in_arguments, names_in_files
from rlobjectives.registry import ALGORITHMS

POLICY = "tests.cli.project.TablePolicy"


def complete(name):
    try:
        Objective.named(name)
    except CapabilityError:
        return False  # some part has an option without a default
    return True


def parsed(*arguments):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(LightningModule, "model")
    with names_in_files():
        found = parser.parse_args(names_in_arguments(arguments))
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # by release
    return instantiate(found).model.objective


def in_file(path, objective):
    config = {"model": {"class_path": POLICY, "init_args": {"objective": objective}}}
    path.write_text(yaml.safe_dump(config))
    return parsed("--config", str(path))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if complete(name)])
def test_a_name_stands_for_its_parts(tmp_path, name):
    assert in_file(tmp_path / "run.yaml", name) == Objective.named(name)
    assert parsed("--model", POLICY, f"--model.init_args.objective={name}") == Objective.named(name)


def test_a_class_named_in_place_of_the_default_has_its_own_defaults(tmp_path):
    """Not those of the class that it replaces: GSPO clips a thousand times closer than ClippedSurrogate."""
    objective = in_file(
        tmp_path / "run.yaml", {"estimator": {"class_path": "GRPO"}, "policy_loss": {"class_path": "GSPO"}}
    )
    assert objective.policy_loss == GSPO()


def test_options_of_an_optional_part_and_of_what_it_holds(tmp_path):
    objective = in_file(
        tmp_path / "run.yaml",
        {"estimator": {"class_path": "GRPO"}, "correction": {"reject": [{"over": "sum", "high": 2.0}]}},
    )
    assert objective.correction == ImportanceCorrection(reject=(Rejection(over="sum", high=2.0),))


def test_what_a_configuration_leaves_out_is_the_default(tmp_path):
    objective = in_file(tmp_path / "run.yaml", {"estimator": {"class_path": "GRPO"}})
    assert (objective.policy_loss, objective.reduction) == (ClippedSurrogate(), TokenMean())


def test_only_names_are_replaced():
    given = ["--config", "run.yaml", "--model.init_args.objective", "gdpo_", "--data.objective=gdpo", "--x"]
    assert names_in_arguments(given) == [*given[:2], "--model.init_args.objective=gdpo_", *given[4:]]
