"""The optimizer of `CausalLMPolicy`: AdamW, without decay on vectors, with a warm-up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["make_optimizer"]


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    warmup_steps: int,
) -> dict[str, Any]:
    """AdamW and a linear warm-up to a constant rate, in the form Lightning takes.

    Args:
        model: Trainable parameters of at least two dimensions decay; biases and norms do not.
        learning_rate: After the warm-up.
        weight_decay: Decoupled decay, a fraction per step of the learning rate.
        betas: AdamW's two decay rates.
        warmup_steps: Optimizer steps of linear warm-up; 0 starts at the full rate.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trainable if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trainable if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=betas
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps))
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
