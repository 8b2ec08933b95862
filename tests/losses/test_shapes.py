"""The pure functions broadcast nothing: a column of one entry per sequence is an error, not a guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlobjectives import PaddedLayout, ShapeError
from rlobjectives.functional import clipped_value_loss, importance_ratio, weighted_sum

LAYOUT = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "clipped_value_loss": (clipped_value_loss, ("values", "returns", "old_values")),
    "importance_ratio": (importance_ratio, ("logprobs", "other")),
    "weighted_sum": (weighted_sum, ("logprobs", "value", "slope", "weights")),
}


@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name, (_, columns) in CALLS.items() for column in columns]
)
def test_a_column_of_one_entry_a_sequence_is_refused(name: str, column: str) -> None:
    function, columns = CALLS[name]
    given = {one: torch.zeros(2, 3) for one in columns}
    function(**given, layout=LAYOUT)
    with pytest.raises(ShapeError, match=rf"{column} has shape \[2, 1\]; expected \[2, 3\]"):
        function(**{**given, column: torch.zeros(2, 1)}, layout=LAYOUT)
