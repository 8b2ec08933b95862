"""A batch of prompts, as a plain class that Lightning moves but does not look into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["PromptBatch"]


class PromptBatch:
    """One rank's prompts of one rollout.

    Args:
        rows: One dictionary a prompt: the prompt and whatever else the data hold about it.
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
