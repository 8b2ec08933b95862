"""Shared maths without parts: one idea per file. `rlobjectives.functional` names what is public of it."""

from rlobjectives.maths.divergences import kl_estimate, topk_divergence, vocabulary_divergence
from rlobjectives.maths.group_advantages import grpo_estimate
from rlobjectives.maths.quantile import window_quantile
from rlobjectives.maths.ratios import importance_ratio, sequence_ratio, sequence_sums, token_ratio
from rlobjectives.maths.returns import Credit, adaptive_trace_decay, lambda_returns
from rlobjectives.maths.shaping import overlong_penalty
from rlobjectives.maths.surrogates import clipped_surrogate, weighted_gradient
from rlobjectives.maths.vtrace import vtrace_returns
from rlobjectives.maths.whitening import whiten

__all__ = [
    "Credit",
    "adaptive_trace_decay",
    "clipped_surrogate",
    "grpo_estimate",
    "importance_ratio",
    "kl_estimate",
    "lambda_returns",
    "overlong_penalty",
    "sequence_ratio",
    "sequence_sums",
    "token_ratio",
    "topk_divergence",
    "vocabulary_divergence",
    "vtrace_returns",
    "weighted_gradient",
    "whiten",
    "window_quantile",
]
