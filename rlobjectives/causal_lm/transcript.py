"""What was said and how it was scored, in words: for people, callbacks and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlobjectives.causal_lm.prompts import PromptBatch
from rlobjectives.causal_lm.rewards import RewardFunctions
from rlobjectives.causal_lm.sampling import Completions
from rlobjectives.statistics import Mean

__all__ = ["Transcript", "transcribe"]


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

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Transcript:
        """The inverse of `state_dict`."""
        return cls(**state)

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


def transcribe(
    batch: PromptBatch,
    completions: Completions,
    *,
    tokenizer: Any,
    end_ids: Sequence[int],
    reward_functions: RewardFunctions,
    repeats: int,
) -> Transcript:
    """Text and scores of completions.

    Args:
        batch: The prompts, and the data's other columns for the reward functions.
        completions: `repeats` of each prompt, side by side.
        tokenizer: Turns ids into text.
        end_ids: Ids that end a completion.
        reward_functions: Score the texts.
        repeats: Completions of each prompt.
    """
    ended = torch.isin(completions.ids, torch.tensor(end_ids, device=completions.ids.device))
    lengths = completions.mask.sum(1).tolist()
    rows = [row[:length] for row, length in zip(completions.ids.tolist(), lengths, strict=True)]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    prompts = [prompt for prompt in batch.prompts for _ in range(repeats)]
    rewards, scored, names = reward_functions(prompts, texts, batch.columns(repeats))
    return Transcript(
        prompts=prompts,
        completions=texts,
        rewards=rewards,
        scored=scored,
        reward_names=names,
        ended=(ended & completions.mask).any(1).cpu(),
    )
