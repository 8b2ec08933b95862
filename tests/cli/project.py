"""What a user's own project would hold: a policy and a data module named in YAML."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from rlobjectives import Objective
from tests.integrations.lightning.runs import uneven
from tests.integrations.lightning.toy import ToyPolicy, full_weights


class TablePolicy(ToyPolicy):
    """Trains on rollouts from a table and leaves its weights in a file."""

    def __init__(
        self,
        objective: Objective,
        micro_batch_size: int = 2,
        normalize_advantages: bool = False,
        top_p: float = 1.0,
        out: str | None = None,
    ) -> None:
        super().__init__(
            uneven,
            objective=objective,
            micro_batch_size=micro_batch_size,
            normalize_advantages=normalize_advantages,
        )
        self.top_p = top_p
        self.out = out

    def trainer_facts(self, datamodule: object | None = None):
        import dataclasses

        return dataclasses.replace(super().trainer_facts(datamodule), top_p=self.top_p)

    def on_train_end(self) -> None:
        weights = full_weights(self)
        if self.out is not None and self.global_rank == 0:
            torch.save(weights, Path(self.out))


class CountingData(LightningDataModule):
    """Batches that are only numbered."""

    def __init__(self, num_generations: int = 2) -> None:
        super().__init__()
        self.num_generations = num_generations

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.arange(3))
