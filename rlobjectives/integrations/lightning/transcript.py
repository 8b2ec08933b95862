"""What was said and how it was scored, in words: for people, callbacks and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlobjectives.statistics import Mean

__all__ = ["Transcript"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """Completions of one rank with their scores.

    Attributes:
        prompts: Prompt of each completion, as it stands in the data.
        completions: Their text, without special tokens.
        rewards: Float64 ``[n, r]`` on the CPU.
        scored: Bool ``[n, r]``; False where a function gave no score.
        reward_names: Names of the ``r`` rewards.
        ended: Bool ``[n]``; False where the completion was cut at the length limit.
    """

    prompts: list[Any]
    completions: list[str]
    rewards: Tensor
    scored: Tensor
    reward_names: tuple[str, ...]
    ended: Tensor

    def accuracy(self, threshold: float, counted: Tensor | None = None) -> Mean:
        """Share of completions whose first reward reaches a threshold, among those it could score."""
        scored = self.scored[:, 0]
        right = (self.rewards[:, 0] >= threshold).double()
        return Mean.of(right, scored if counted is None else scored & counted)

    def records(self, limit: int | None = None) -> list[dict[str, Any]]:
        """One JSON-ready dictionary a completion; an unscored reward is None."""
        found = []
        columns = zip(
            self.prompts,
            self.completions,
            self.rewards.tolist(),
            self.scored.tolist(),
            self.ended.tolist(),
            strict=True,
        )
        for position, (prompt, completion, rewards, scored, ended) in enumerate(columns):
            if limit is not None and position >= limit:
                break
            scores = zip(self.reward_names, rewards, scored, strict=True)
            found.append(
                {
                    "prompt": prompt,
                    "completion": completion,
                    "ended": ended,
                    "rewards": {name: reward if there else None for name, reward, there in scores},
                }
            )
        return found
