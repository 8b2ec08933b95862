"""What users may rely on stays: a name, a parameter, an option, a metric or a configuration may be added, never lost.

`python tools/public_surface.py write` adds what is new to the file. A module may become an alias of another, and a name
an alias of its successor; whatever goes for good has to be taken out of the file by hand, and stands in the changelog.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import configurations
import public_surface

STORED = public_surface.load()


def test_every_name_can_be_imported_from_where_it_was() -> None:
    assert public_surface.lost_names(STORED["names"]) == []


def test_every_parameter_is_taken() -> None:
    assert public_surface.lost_parameters(STORED["parameters"]) == []


def test_every_option_has_its_default() -> None:
    assert public_surface.lost_options(STORED["options"]) == []


def test_every_registered_name_stands_for_its_parts() -> None:
    assert public_surface.lost_algorithms(STORED["algorithms"]) == []


def test_every_metric_is_declared() -> None:
    assert public_surface.lost_metrics(STORED["metrics"]) == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(STORED["configurations"]))
def test_every_configuration_gives_its_objective(name: str) -> None:
    entry = STORED["configurations"][name]
    if not configurations.readable(entry):
        pytest.skip(f"needs {entry['for']}")
    assert configurations.lost(entry) == []


def test_examples_and_pages_are_in_the_file() -> None:
    files = [entry["file"] for entry in STORED["configurations"].values()]
    new = [name for name, entry in configurations.files().items() if entry["file"] not in files]
    assert new == [], "run python tools/public_surface.py write"


LOSSES: list[tuple[str, dict[str, Any], str]] = [
    (
        "lost_names",
        {"rlobjectives.losses": ["PolicyLoss", "PolicyLos"]},
        "rlobjectives.losses.PolicyLos is gone",
    ),
    ("lost_names", {"rlobjectives.lossses": []}, "rlobjectives.lossses cannot be imported"),
    ("lost_parameters", {"rlobjectives.scores:reward_matrix": ["*", "nan"]}, "no longer takes 'nan'"),
    ("lost_parameters", {"rlobjectives.masking:select": ["mask", "values", "*"]}, "by place; it took"),
    (
        "lost_options",
        {"rlobjectives.objective:Objective": {"entropy": "0.0"}},
        "has lost the option 'entropy'",
    ),
    ("lost_options", {"rlobjectives.objective:Objective": {"entropy_coef": "0.2"}}, "is 0.0; it was 0.2"),
    ("lost_algorithms", {"sapo": {"policy_loss": "NoLoss"}}, "'sapo' no longer has policy_loss=NoLoss"),
    ("lost_algorithms", {"sapoo": {"policy_loss": "NoLoss"}}, "'sapoo' no longer has policy_loss=NoLoss"),
    ("lost_metrics", {"loss/totals": ["Sum", "loss"]}, "the metric 'loss/totals' is gone"),
    ("lost_metrics", {"loss/total": ["Mean", "loss"]}, "it was a ['Mean', 'loss']"),
]


@pytest.mark.parametrize(("chapter", "stored", "message"), LOSSES)
def test_a_loss_is_told(chapter: str, stored: dict[str, Any], message: str) -> None:
    (told,) = getattr(public_surface, chapter)(stored)
    assert message in told
