"""Every pure function in one place, for those who want the maths without the parts."""

from rlobjectives.estimators import (
    adaptive_trace_decay,
    grpo_estimate,
    lambda_returns,
    overlong_penalty,
    pass_at_k,
    vtrace_returns,
    whiten,
)
from rlobjectives.losses import (
    clipped_surrogate,
    importance_ratio,
    kl_estimate,
    token_ratio,
    weighted_sum,
)
from rlobjectives.rollouts import reward_matrix

__all__ = [
    "adaptive_trace_decay",
    "clipped_surrogate",
    "grpo_estimate",
    "importance_ratio",
    "kl_estimate",
    "lambda_returns",
    "overlong_penalty",
    "pass_at_k",
    "reward_matrix",
    "token_ratio",
    "vtrace_returns",
    "weighted_sum",
    "whiten",
]
