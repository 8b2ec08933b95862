"""A trainer that says nothing and saves only where it is told to."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from tests.integrations.lightning.toy import full_weights


def trainer(**options: Any) -> Trainer:
    """On one CPU, for one epoch."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet["enable_checkpointing"] = any(isinstance(one, Checkpoint) for one in options.get("callbacks", []))
    return Trainer(accelerator="cpu", devices=1, **{"max_epochs": 1, **quiet, **options})


def weights(module: Any) -> torch.Tensor:
    """All of them."""
    return full_weights(module)
