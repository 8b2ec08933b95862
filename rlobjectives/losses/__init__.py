"""Policy losses and what is added to them: one number a token and its slope, never reduced here."""

from rlobjectives.losses.adaptive import AdaptiveCoefficient, SteppedCoefficient
from rlobjectives.losses.base import PolicyLoss, TokenLoss, TokenPart, TokenTerm
from rlobjectives.losses.cispo import CISPO, bounded_weight, weighted_gradient
from rlobjectives.losses.clipped import ClippedSurrogate, clipped_surrogate
from rlobjectives.losses.corrections import PolicyCorrection, TokenWeights
from rlobjectives.losses.decoupled import DecoupledClip, behavior_weight
from rlobjectives.losses.distillation import (
    AdvantageShaping,
    Distillation,
    DivergenceDistillation,
    ReverseKLDistillation,
)
from rlobjectives.losses.divergence import topk_divergence, vocabulary_divergence
from rlobjectives.losses.dppo import DPPO, binary_kl, outside_trust_region
from rlobjectives.losses.dro import DRO, quadratic_leash
from rlobjectives.losses.entropy_mask import EntropyMask
from rlobjectives.losses.gmpo import GMPO, one_sided_log_ratio
from rlobjectives.losses.gspo import GSPO, GSPOToken, sequence_surrogate
from rlobjectives.losses.importance_correction import ImportanceCorrection, Rejection
from rlobjectives.losses.kl import KLPenalty, kl_estimate
from rlobjectives.losses.kl_cov import KLCov, token_covariance
from rlobjectives.losses.m2po import M2PO
from rlobjectives.losses.opsm import OPSM
from rlobjectives.losses.p3o import P3O, behavior_divergence, capped_score
from rlobjectives.losses.quantile import window_quantile
from rlobjectives.losses.ratios import importance_ratio, sequence_ratio, sequence_sums, token_ratio
from rlobjectives.losses.reinforce import Reinforce
from rlobjectives.losses.sapo import SAPO, soft_gate
from rlobjectives.losses.value import ClippedValueLoss, clipped_value_loss
from rlobjectives.losses.vespo import VESPO, gamma_weight
from rlobjectives.losses.weighted_sum import weighted_sum

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "M2PO",
    "OPSM",
    "P3O",
    "SAPO",
    "VESPO",
    "AdaptiveCoefficient",
    "AdvantageShaping",
    "ClippedSurrogate",
    "ClippedValueLoss",
    "DecoupledClip",
    "Distillation",
    "DivergenceDistillation",
    "EntropyMask",
    "GSPOToken",
    "ImportanceCorrection",
    "KLCov",
    "KLPenalty",
    "PolicyCorrection",
    "PolicyLoss",
    "Reinforce",
    "Rejection",
    "ReverseKLDistillation",
    "SteppedCoefficient",
    "TokenLoss",
    "TokenPart",
    "TokenTerm",
    "TokenWeights",
    "behavior_divergence",
    "behavior_weight",
    "binary_kl",
    "bounded_weight",
    "capped_score",
    "clipped_surrogate",
    "clipped_value_loss",
    "gamma_weight",
    "importance_ratio",
    "kl_estimate",
    "one_sided_log_ratio",
    "outside_trust_region",
    "quadratic_leash",
    "sequence_ratio",
    "sequence_sums",
    "sequence_surrogate",
    "soft_gate",
    "token_covariance",
    "token_ratio",
    "topk_divergence",
    "vocabulary_divergence",
    "weighted_gradient",
    "weighted_sum",
    "window_quantile",
]
