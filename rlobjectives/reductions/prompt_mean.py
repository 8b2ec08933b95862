"""Every prompt counts the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.layouts import TokenLayout
from rlobjectives.reductions.base import LossReduction, inverse
from rlobjectives.statistics import Stat, Sum

__all__ = ["PromptMean"]

_REMEDY = (
    "PromptMean needs to know each prompt's size: build the layout of the window's sequences with "
    "layout.with_prompts(group_ids) and cut micro-batches from it with layout.rows(index)."
)


@dataclass(frozen=True, kw_only=True)
class PromptMean(LossReduction):
    """Mean over prompts of the mean over all tokens of their answers: ``wₜ = 1 / (P · T_prompt)``.

    P counts all prompts, those without any counted token included.

    Raises:
        MissingColumnError: If the layout was not built with `TokenLayout.with_prompts`.

    Source:
        SkyRL's prompt-mean. (torchrl gives that name to the sequence mean.)

    Example:
        >>> PromptMean()
        PromptMean()
    """

    averages: ClassVar[bool] = True
    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {"prompts": Sum}
    follows_mask: ClassVar[bool] = False
    reads = ("prompt_tokens", "prompt_sequences")

    def statistics(self, layout: TokenLayout) -> dict[str, Stat]:
        """Each sequence is its share of a prompt, so that any cut counts every prompt once."""
        share = inverse(layout.fact("prompt_sequences", _REMEDY))
        return {"prompts": Sum.of(share, layout.sequence_mask())}

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        """``1 / (P · T_prompt)`` for each sequence."""
        return inverse(context.get("prompts", Sum).value) * inverse(layout.fact("prompt_tokens", _REMEDY))
