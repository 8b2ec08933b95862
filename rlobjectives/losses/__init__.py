"""Policy losses and what is added to them: one number a token and its slope, never reduced here."""

from rlobjectives.losses.base import PolicyLoss, TokenLoss, TokenTerm
from rlobjectives.losses.clipped import ClippedSurrogate, clipped_surrogate
from rlobjectives.losses.kl import KLPenalty, kl_estimate
from rlobjectives.losses.ratios import importance_ratio, token_ratio
from rlobjectives.losses.reinforce import Reinforce
from rlobjectives.losses.weighted_sum import weighted_sum

__all__ = [
    "ClippedSurrogate",
    "KLPenalty",
    "PolicyLoss",
    "Reinforce",
    "TokenLoss",
    "TokenTerm",
    "clipped_surrogate",
    "importance_ratio",
    "kl_estimate",
    "token_ratio",
    "weighted_sum",
]
