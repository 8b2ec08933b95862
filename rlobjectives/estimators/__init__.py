"""Estimators: rewards in, advantages out. One file an estimator.

Each declares what it needs, estimates whole groups without communication, and finalises with what
the window knows. To add one: subclass `Estimator`, give it an oracle and a line in the registry.
"""

from rlobjectives.estimators.advantage_metrics import advantage_metrics
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.batch_baseline import BatchBaseline
from rlobjectives.estimators.combined import Combined
from rlobjectives.estimators.credit_metrics import (
    group_metrics,
    length_metrics,
    value_metrics,
)
from rlobjectives.estimators.diagnostics import reward_metrics
from rlobjectives.estimators.function import FunctionEstimator
from rlobjectives.estimators.gae import GAE, adaptive_trace_decay
from rlobjectives.estimators.gdpo import GDPO
from rlobjectives.estimators.given import GivenAdvantages
from rlobjectives.estimators.gpg import GPG
from rlobjectives.estimators.grpo import GRPO, grpo_estimate
from rlobjectives.estimators.max_rl import MaxRL
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.opo import OPO
from rlobjectives.estimators.optimal_token_baseline import OptimalTokenBaseline
from rlobjectives.estimators.pass_at_k import PassAtK, pass_at_k
from rlobjectives.estimators.reinforce_pp import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rlobjectives.estimators.remax import ReMax
from rlobjectives.estimators.returns import Credit, lambda_returns
from rlobjectives.estimators.rloo import RLOO
from rlobjectives.estimators.shaping import overlong_penalty
from rlobjectives.estimators.td_lambda import TDLambda
from rlobjectives.estimators.teacher import TeacherSignal
from rlobjectives.estimators.vtrace import VTrace, vtrace_returns
from rlobjectives.estimators.whitening import whiten

__all__ = [
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "OPO",
    "RLOO",
    "BatchBaseline",
    "Combined",
    "Credit",
    "Estimator",
    "FunctionEstimator",
    "GivenAdvantages",
    "MaxRL",
    "Normalized",
    "OptimalTokenBaseline",
    "PassAtK",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "TDLambda",
    "TeacherSignal",
    "VTrace",
    "adaptive_trace_decay",
    "advantage_metrics",
    "group_metrics",
    "grpo_estimate",
    "lambda_returns",
    "length_metrics",
    "overlong_penalty",
    "pass_at_k",
    "reward_metrics",
    "value_metrics",
    "vtrace_returns",
    "whiten",
]
