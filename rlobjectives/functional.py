"""Every pure function in one place, for those who want the maths without the parts."""

from rlobjectives.estimators import grpo_estimate, whiten
from rlobjectives.losses import (
    behavior_divergence,
    capped_score,
    clipped_surrogate,
    importance_ratio,
    kl_estimate,
    sequence_ratio,
    sequence_sums,
    token_ratio,
    topk_divergence,
    vocabulary_divergence,
    weighted_sum,
)
from rlobjectives.rollouts import reward_matrix

__all__ = [
    "behavior_divergence",
    "capped_score",
    "clipped_surrogate",
    "grpo_estimate",
    "importance_ratio",
    "kl_estimate",
    "reward_matrix",
    "sequence_ratio",
    "sequence_sums",
    "token_ratio",
    "topk_divergence",
    "vocabulary_divergence",
    "weighted_sum",
    "whiten",
]
