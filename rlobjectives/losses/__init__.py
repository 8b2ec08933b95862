"""Policy losses and what is added to them: one number a token and its slope, never reduced here."""

from rlobjectives.losses.base import PolicyLoss, TokenLoss, TokenPart, TokenTerm
from rlobjectives.losses.clipped import ClippedSurrogate, clipped_surrogate
from rlobjectives.losses.corrections import PolicyCorrection, TokenWeights
from rlobjectives.losses.distillation import (
    AdvantageShaping,
    Distillation,
    DivergenceDistillation,
    ReverseKLDistillation,
)
from rlobjectives.losses.divergence import topk_divergence, vocabulary_divergence
from rlobjectives.losses.importance_correction import ImportanceCorrection, Rejection
from rlobjectives.losses.kl import KLPenalty, kl_estimate
from rlobjectives.losses.m2po import M2PO
from rlobjectives.losses.opsm import OPSM
from rlobjectives.losses.p3o import P3O, behavior_divergence, capped_score
from rlobjectives.losses.ratios import importance_ratio, sequence_ratio, sequence_sums, token_ratio
from rlobjectives.losses.reinforce import Reinforce
from rlobjectives.losses.weighted_sum import weighted_sum

__all__ = [
    "M2PO",
    "OPSM",
    "P3O",
    "AdvantageShaping",
    "ClippedSurrogate",
    "Distillation",
    "DivergenceDistillation",
    "ImportanceCorrection",
    "KLPenalty",
    "PolicyCorrection",
    "PolicyLoss",
    "Reinforce",
    "Rejection",
    "ReverseKLDistillation",
    "TokenLoss",
    "TokenPart",
    "TokenTerm",
    "TokenWeights",
    "behavior_divergence",
    "capped_score",
    "clipped_surrogate",
    "importance_ratio",
    "kl_estimate",
    "sequence_ratio",
    "sequence_sums",
    "token_ratio",
    "topk_divergence",
    "vocabulary_divergence",
    "weighted_sum",
]
