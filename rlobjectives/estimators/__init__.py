"""Estimators: rewards in, advantages out. One file an estimator.

Each declares what it needs, estimates whole groups without communication, and finalises with what
the window knows. To add one: subclass `Estimator`, give it an oracle and a line in the registry.
"""

from rlobjectives._moved import moved_names
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.batch_baseline import BatchBaseline
from rlobjectives.estimators.combined import Combined
from rlobjectives.estimators.function import FunctionEstimator
from rlobjectives.estimators.gae import GAE
from rlobjectives.estimators.gdpo import GDPO
from rlobjectives.estimators.given import GivenAdvantages
from rlobjectives.estimators.gpg import GPG
from rlobjectives.estimators.grpo import GRPO
from rlobjectives.estimators.max_rl import MaxRL
from rlobjectives.estimators.normalized import Normalized
from rlobjectives.estimators.opo import OPO
from rlobjectives.estimators.optimal_token_baseline import OptimalTokenBaseline
from rlobjectives.estimators.pass_at_k import PassAtK, pass_at_k
from rlobjectives.estimators.reinforce_pp import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rlobjectives.estimators.remax import ReMax
from rlobjectives.estimators.rloo import RLOO
from rlobjectives.estimators.td_lambda import TDLambda
from rlobjectives.estimators.teacher import TeacherSignal
from rlobjectives.estimators.vtrace import VTrace

__all__ = [
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "OPO",
    "RLOO",
    "BatchBaseline",
    "Combined",
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
    "pass_at_k",
]

__getattr__ = moved_names(__name__, warn=False)
