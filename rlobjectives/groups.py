"""Prompt groups: which sequences answer the same prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import check_integral

__all__ = ["Groups"]

_ONE_A_PROMPT = (
    "one id per prompt: number your prompt keys once per rollout (the same prompt twice gets two ids)"
)


@dataclass(frozen=True, slots=True)
class Groups:
    """Prompt groups of a batch of sequences: any ids, any order, any sizes.

    Attributes:
        ids: Sorted unique ids, ``[g]``.
        index: Position of each sequence's group in `ids`, ``[n]``.
        sizes: Members of each group, int64 ``[g]``; dummies are none.
        smallest: Size of the smallest group that has a member (0 when there is none), read once.
    """

    ids: Tensor
    index: Tensor
    sizes: Tensor
    smallest: int

    @classmethod
    def of(
        cls,
        group_ids: Tensor,
        name: str = "group_ids",
        *,
        meaning: str = _ONE_A_PROMPT,
        genuine: Tensor | None = None,
    ) -> Groups:
        """Number the groups of integer ids ``[n]``; ``meaning`` is for the message where they are something else.

        ``genuine`` is False for dummies, which keep their place in `index`.
        """
        check_integral(name, group_ids, meaning=meaning)
        ids, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        if genuine is not None:
            sizes = torch.zeros_like(sizes).index_add(0, index, genuine.to(sizes))
        members = sizes[sizes > 0]  # a group of dummies has none
        return cls(ids, index, sizes, int(members.min()) if members.numel() else 0)

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.ids.numel()
