"""What makes two forwards of the same weights differ: dropout, and state that a forward changes."""

from __future__ import annotations

from torch import nn

from rlobjectives.integrations.dropout import dropouts

__all__ = ["dropouts", "forward_side_effects"]


def forward_side_effects(module: nn.Module) -> tuple[str, ...]:
    """What a training forward changes besides its output, as far as the module's layers tell."""
    batch_norm = nn.modules.batchnorm._BatchNorm  # the only common base there is
    found = any(isinstance(part, batch_norm) and part.track_running_stats for part in module.modules())
    return ("batch-norm statistics",) if found else ()
