"""rlobjectives: RL objectives for language models, as parts for the trainer you already have."""

from rlobjectives import (
    _moved,
    corrections,
    errors,
    estimators,
    functional,
    layouts,
    losses,
    metrics,
    reductions,
    statistics,
    terms,
    token_parts,
)
from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.columns import Column, Read, read
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.corrections import *
from rlobjectives.distributed import (
    LOCAL,
    Communicator,
    GradientScale,
    check_agreement,
    ends_together,
    synchronize,
)
from rlobjectives.errors import *
from rlobjectives.estimators import *
from rlobjectives.layouts import *
from rlobjectives.losses import *
from rlobjectives.metrics import *
from rlobjectives.objective import Objective
from rlobjectives.options import bounds, option
from rlobjectives.reductions import *
from rlobjectives.registry import ALGORITHMS, AlgorithmSpec
from rlobjectives.rollouts import Groups, Rollouts
from rlobjectives.scores import reward_matrix
from rlobjectives.statistics import *
from rlobjectives.terms import *
from rlobjectives.token_parts import *
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import ObjectiveOutput, Window, WindowBuilder, merge_reports

_moved.install()

__version__ = "0.1.0"

# Whatever these rooms name and is no function: those of parts are in `functional`.
_ROOMS = (corrections, errors, estimators, layouts, losses, reductions, statistics, terms, token_parts)

__all__ = [
    *metrics.__all__,
    *(name for room in _ROOMS for name in room.__all__ if not name.islower()),
    "ALGORITHMS",
    "LOCAL",
    "AlgorithmSpec",
    "Capabilities",
    "Column",
    "Communicator",
    "Component",
    "GradientScale",
    "Groups",
    "Metric",
    "Objective",
    "ObjectiveOutput",
    "Read",
    "Rollouts",
    "TokenBatch",
    "TrainerFacts",
    "Window",
    "WindowBuilder",
    "WindowContext",
    "bounds",
    "check_agreement",
    "ends_together",
    "functional",
    "merge_reports",
    "option",
    "read",
    "reward_matrix",
    "synchronize",
]
