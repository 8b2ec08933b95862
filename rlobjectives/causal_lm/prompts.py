"""A batch of prompts, as a plain class that Lightning moves but does not look into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlobjectives.checks import shown
from rlobjectives.columns import COLUMNS
from rlobjectives.errors import MissingColumnError
from rlobjectives.objective import Objective

__all__ = ["PromptBatch", "own_columns"]


class PromptBatch:
    """One rank's prompts of one rollout.

    Args:
        rows: One dictionary per prompt: the prompt and whatever else the data hold about it.
        prompt_column: Key of the prompt, a string or a list of chat messages.
        ids: Identity of each prompt inside the rollout, different over all ranks.
        num_generations: Completions to sample for each prompt.
        counted: False for a filler that only keeps the ranks' batches equally many. None: all count.
        number: Position of the batch in the run, from 0.

    Example:
        >>> batch = PromptBatch([{"prompt": "1+1=", "answer": "2"}], prompt_column="prompt", ids=[0])
        >>> batch.prompts, batch.columns(repeats=2)
        (['1+1='], {'answer': ['2', '2']})
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        prompt_column: str,
        ids: Sequence[int],
        num_generations: int = 1,
        counted: Sequence[bool] | None = None,
        number: int = 0,
    ) -> None:
        self.rows = list(rows)
        self.prompt_column = prompt_column
        self.ids = list(ids)
        self.num_generations = num_generations
        self.counted = [True] * len(self.rows) if counted is None else list(counted)
        self.number = number

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"PromptBatch({len(self)} prompts × {self.num_generations}, number {self.number})"

    def to(self, device: torch.device | str) -> PromptBatch:
        """Nothing here lives on a device."""
        del device
        return self

    @property
    def prompts(self) -> list[Any]:
        """The prompts."""
        return [row[self.prompt_column] for row in self.rows]

    def columns(self, repeats: int = 1) -> dict[str, list[Any]]:
        """Every column but the prompt, each entry repeated for a prompt's completions."""
        names = [name for name in (self.rows[0] if self.rows else ()) if name != self.prompt_column]
        return {name: [row[name] for row in self.rows for _ in range(repeats)] for name in names}


def own_columns(objective: Objective, batch: PromptBatch, device: torch.device) -> dict[str, Tensor]:
    """Columns per sequence of a user's own that an objective reads, from those of the prompts' rows.

    Args:
        objective: Its parts say which.
        batch: The prompts.
        device: Where the columns go.

    Returns:
        One number per completion, ``[n]`` float32, a prompt's completions side by side; without what the data lack.

    Raises:
        MissingColumnError: If an entry is no number.
    """
    reads = {**objective.reads(), **objective.estimator_reads()}
    wanted = [name for name, one in reads.items() if name not in COLUMNS and one.column.per == "sequence"]
    found = batch.columns(batch.num_generations)
    for name in wanted:
        odd = next(
            (
                one
                for one in found.get(name, ())
                if isinstance(one, bool) or not isinstance(one, (int, float))
            ),
            None,
        )
        if odd is not None:
            raise MissingColumnError(
                f"{objective.name} reads {name}, and a prompt's row has {shown(odd)} there; expected one number per prompt."
            )
    return {
        name: torch.tensor(found[name], dtype=torch.float32, device=device)
        for name in wanted
        if name in found
    }
