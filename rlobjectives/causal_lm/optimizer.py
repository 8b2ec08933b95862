"""The optimizers of the language-model policies: AdamW, without decay on vectors, with a warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["actor_critic_optimizer", "make_optimizer"]


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
    groups = _groups(model.parameters(), "policy", learning_rate, weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps))
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def actor_critic_optimizer(
    policy: Iterable[nn.Parameter],
    critic: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    critic_learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    warmup_steps: int,
    critic_warmup_steps: int,
) -> dict[str, Any]:
    """One AdamW with groups of their own for policy and critic, whose names begin with ``policy`` and ``critic``.

    Args:
        policy: The policy's weights.
        critic: The critic's.
        learning_rate: Of the policy, after its warm-up.
        critic_learning_rate: Of the critic, after its warm-up.
        weight_decay: Decoupled decay of both, on matrices only.
        betas: AdamW's two decay rates.
        warmup_steps: Steps of linear warm-up of either; the critic's begins with the first step, the policy's with its
            own first step.
        critic_warmup_steps: Steps in which the policy rests.
    """
    groups = _groups(policy, "policy", learning_rate, weight_decay)
    groups += _groups(critic, "critic", critic_learning_rate, weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=betas)
    ramp = max(1, warmup_steps)

    def of_policy(step: int) -> float:
        return min(1.0, max(0, step + 1 - critic_warmup_steps) / ramp)

    def of_critic(step: int) -> float:
        return min(1.0, (step + 1) / ramp)

    ramps: list[Callable[[int], float]] = [
        of_policy if group["name"].startswith("policy") else of_critic for group in groups
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, ramps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _groups(
    parameters: Iterable[nn.Parameter], name: str, learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Trainable matrices, which decay, and vectors, which do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [one for one in trainable if one.dim() >= 2]
    vectors = [one for one in trainable if one.dim() < 2]
    groups = [
        {"name": name, "params": matrices, "weight_decay": weight_decay, "lr": learning_rate},
        {"name": f"{name}_vectors", "params": vectors, "weight_decay": 0.0, "lr": learning_rate},
    ]
    return [group for group in groups if group["params"]]
