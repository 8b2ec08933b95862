"""Dropout that is on, in the layers of a module."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["dropouts", "largest_dropout"]


def dropouts(module: nn.Module, *, disable: bool = False) -> list[float]:
    """Every dropout probability that is on, in dropout layers and in layers that keep it as a number."""
    found: list[float] = []
    for part in module.modules():
        names = [name for name in vars(part) if "dropout" in name]
        for name in ["p", *names] if isinstance(part, _DropoutNd) else names:
            value = getattr(part, name)
            if isinstance(value, float) and 0.0 < value <= 1.0:
                found.append(value)
                if disable:
                    setattr(part, name, 0.0)
    return found


def largest_dropout(model: nn.Module) -> float:
    """Largest dropout probability active in a training forward, attention's functional one included."""
    return max(dropouts(model), default=0.0)
