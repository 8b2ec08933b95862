"""Estimators: rewards in, advantages out. One file an estimator.

Each declares what it needs, estimates whole groups without communication, and finalises with what
the window knows. To add one: subclass `Estimator`, give it an oracle and a line in the registry.
"""

from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.diagnostics import reward_metrics
from rlobjectives.estimators.gdpo import GDPO
from rlobjectives.estimators.grpo import GRPO, grpo_estimate
from rlobjectives.estimators.rloo import RLOO
from rlobjectives.estimators.whitening import whiten

__all__ = ["GDPO", "GRPO", "RLOO", "Estimator", "grpo_estimate", "reward_metrics", "whiten"]
