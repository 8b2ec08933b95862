"""Random batches in both layouts, for the tests of losses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlobjectives import GRPO, Objective, PackedLayout, PaddedLayout, TokenBatch, TokenLayout, TokenLoss
from rlobjectives.component import WindowContext
from rlobjectives.token_parts import TokenTerm

COLUMNS = ("logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs", "advantages")


@dataclass
class Batch:
    """Ragged sequences: for each column one list of numbers per sequence."""

    columns: dict[str, list[list[float]]] = field(default_factory=dict)

    @classmethod
    def random(
        cls, lengths: list[int], seed: int = 0, spread: float = 0.5, token_advantages: bool = False
    ) -> Batch:
        torch.manual_seed(seed)
        batch = cls()
        base = [(-3 * torch.rand(n, dtype=torch.float64) - 0.05).tolist() for n in lengths]
        for name in COLUMNS[:4]:
            noise = [torch.randn(n, dtype=torch.float64).mul(spread) for n in lengths]
            batch.columns[name] = [
                [min(b + d, -1e-3) for b, d in zip(row, extra.tolist(), strict=True)]
                for row, extra in zip(base, noise, strict=False)
            ]
        batch.columns["advantages"] = [
            torch.randn(n if token_advantages else 1, dtype=torch.float64).expand(n).tolist() for n in lengths
        ]
        return batch

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.columns["logprobs"]]

    def padded(
        self, dtype: torch.dtype = torch.float64, fill: float = float("nan"), extra: int = 2
    ) -> TokenBatch:
        """Rows with ``fill`` under the mask."""
        width = max(self.lengths, default=0) + extra
        mask = torch.zeros(len(self.lengths), width, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            mask[row, :length] = True
        columns = {}
        for name, rows in self.columns.items():
            column = torch.full(mask.shape, fill, dtype=dtype)
            for row, numbers in enumerate(rows):
                column[row, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
            columns[name] = column
        return TokenBatch(layout=PaddedLayout(mask), **columns)

    def packed(self, dtype: torch.dtype = torch.float64, fill: float = float("inf")) -> TokenBatch:
        """End to end, each sequence followed by one masked token that holds ``fill``."""
        bounds = torch.tensor([0, *[n + 1 for n in self.lengths]]).cumsum(0)
        mask = torch.cat([torch.tensor([True] * n + [False]) for n in self.lengths])
        columns = {
            name: torch.cat([torch.tensor([*row, fill], dtype=dtype) for row in rows])
            for name, rows in self.columns.items()
        }
        return TokenBatch(layout=PackedLayout(bounds, mask), **columns)


def context_of(layout: TokenLayout, scope: str = "policy_loss") -> WindowContext:
    """What a window of this one micro-batch knows."""
    objective = Objective(estimator=GRPO())
    return objective.freeze([(torch.zeros(layout.num_sequences), layout)]).context(scope)


def run(part: TokenTerm, tokens: TokenBatch) -> TokenLoss:
    return part.value_and_slope(tokens.detach(), context_of(tokens.layout))


def counted(per_token: Tensor, layout: TokenLayout) -> list[float]:
    """The counted tokens' numbers, in order."""
    return per_token[layout.mask].tolist()
