"""Policy losses: a value and its slope per token, never reduced here."""

from rlobjectives._moved import moved_names
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.losses.cispo import CISPO, bounded_weight
from rlobjectives.losses.clipped import ClippedSurrogate
from rlobjectives.losses.decoupled import DecoupledClip, behavior_weight
from rlobjectives.losses.dppo import DPPO, binary_kl, outside_trust_region
from rlobjectives.losses.dro import DRO, quadratic_leash
from rlobjectives.losses.gmpo import GMPO, one_sided_log_ratio
from rlobjectives.losses.gspo import GSPO, GSPOToken, sequence_surrogate
from rlobjectives.losses.kl_cov import KLCov, token_covariance
from rlobjectives.losses.m2po import M2PO
from rlobjectives.losses.p3o import P3O, behavior_divergence, capped_score
from rlobjectives.losses.reinforce import Reinforce
from rlobjectives.losses.sapo import SAPO, soft_gate
from rlobjectives.losses.vespo import VESPO, gamma_weight

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "M2PO",
    "P3O",
    "SAPO",
    "VESPO",
    "ClippedSurrogate",
    "DecoupledClip",
    "GSPOToken",
    "KLCov",
    "PolicyLoss",
    "Reinforce",
    "behavior_divergence",
    "behavior_weight",
    "binary_kl",
    "bounded_weight",
    "capped_score",
    "gamma_weight",
    "one_sided_log_ratio",
    "outside_trust_region",
    "quadratic_leash",
    "sequence_surrogate",
    "soft_gate",
    "token_covariance",
]

__getattr__ = moved_names(__name__, warn=False)
