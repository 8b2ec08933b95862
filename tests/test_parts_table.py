"""docs/parts.md and README's rows of parts are generated, complete and up to date."""

from __future__ import annotations

import re

import pytest

import parts_table
import rlobjectives
from tests.parts import PARTS

STALE = "run python tools/parts_table.py"


def test_the_page_is_what_the_code_says() -> None:
    assert parts_table.PAGE.read_text(encoding="utf-8") == parts_table.page(), STALE


def test_the_rows_of_the_readme_are_what_the_code_says() -> None:
    assert parts_table.README.read_text(encoding="utf-8") == parts_table.readme(), STALE


def test_every_part_has_one_row_with_all_of_its_options() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", parts_table.page(), re.MULTILINE))
    assert {type(part).__name__ for part in PARTS} <= {*rows}
    for name, row in rows.items():
        said, shown = row.rsplit(" | ", 1) if row.count(" | ") else (row, "")
        assert 15 < len(said) < 130, f"{name}: begin its docstring with one short sentence"
        for option in parts_table.options(getattr(rlobjectives, name)):
            assert f"`{option}" in shown, name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GDPO", "Estimators, per sequence"),
        ("GAE", "Estimators, per token"),
        ("Combined", "Estimators, either"),
        ("FunctionEstimator", "Estimators, either"),
        ("P3O", "Policy losses"),
        ("ReverseKLDistillation", "Other terms"),
        ("KLPenalty", "Other terms"),
        ("OPSM", "Corrections"),
        ("PromptMean", "Reductions"),
    ],
)
def test_a_part_is_listed_by_what_it_is_for(name: str, kind: str) -> None:
    assert parts_table.kind_of(getattr(rlobjectives, name)) == kind


def test_a_row_that_is_missing_from_the_readme_is_told(tmp_path, monkeypatch) -> None:
    short = tmp_path / "README.md"
    short.write_text(parts_table.README.read_text("utf-8").replace("| Reductions |", "| Weights |"), "utf-8")
    monkeypatch.setattr(parts_table, "README", short)
    with pytest.raises(ValueError, match="should have one row 'Reductions'"):
        parts_table.readme()
