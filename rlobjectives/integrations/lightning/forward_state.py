"""What makes two forwards of the same weights differ: dropout, and state that a forward changes."""

from __future__ import annotations

from torch import nn

__all__ = ["dropouts", "forward_side_effects"]

_DROPOUT_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def dropouts(module: nn.Module, *, disable: bool = False) -> list[float]:
    """Every dropout probability that is on, in dropout layers and in layers that keep it as a number."""
    found: list[float] = []
    for part in module.modules():
        names = [name for name in vars(part) if "dropout" in name]
        for name in ["p", *names] if isinstance(part, _DROPOUT_LAYERS) else names:
            value = getattr(part, name)
            if isinstance(value, float) and 0.0 < value <= 1.0:
                found.append(value)
                if disable:
                    setattr(part, name, 0.0)
    return found


def forward_side_effects(module: nn.Module) -> tuple[str, ...]:
    """What a training forward changes besides its output, as far as the module's layers tell."""
    batch_norm = nn.modules.batchnorm._BatchNorm  # the only common base there is
    found = any(isinstance(part, batch_norm) and part.track_running_stats for part in module.modules())
    return ("batch-norm statistics",) if found else ()
