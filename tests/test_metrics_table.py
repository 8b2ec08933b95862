"""docs/metrics.md is generated, complete and up to date."""

from __future__ import annotations

import metrics_table
from rlobjectives import Metric, Stat
from tests.parts import OBJECTIVES


def test_the_page_is_what_the_code_declares() -> None:
    assert metrics_table.PATH.read_text(encoding="utf-8") == metrics_table.table(), (
        "docs/metrics.md is out of date: run python tools/metrics_table.py"
    )


def test_every_metric_of_every_objective_is_on_the_page() -> None:
    page = metrics_table.table()
    for objective in OBJECTIVES.values():
        for name, metric in objective.declared_metrics().items():
            shared = name.startswith("loss/")  # one share a term, named by its field
            assert shared or f"`{name}`" in page, name
            assert isinstance(metric, Metric)
            assert issubclass(metric.kind, Stat)
            assert metric.unit
            assert metric.meaning
            assert "/" in name
