"""What is added to the policy loss: penalties, the critic's loss, distillation."""

from rlobjectives.terms.adaptive import AdaptiveCoefficient, SteppedCoefficient
from rlobjectives.terms.distillation import (
    AdvantageShaping,
    Distillation,
    DivergenceDistillation,
    ReverseKLDistillation,
)
from rlobjectives.terms.kl import KLPenalty
from rlobjectives.terms.value import ClippedValueLoss, clipped_value_loss

__all__ = [
    "AdaptiveCoefficient",
    "AdvantageShaping",
    "ClippedValueLoss",
    "Distillation",
    "DivergenceDistillation",
    "KLPenalty",
    "ReverseKLDistillation",
    "SteppedCoefficient",
    "clipped_value_loss",
]
