"""rlobjectives: RL objectives for language models, as parts for the trainer you already have."""

from rlobjectives import _moved, estimators, functional, losses, reductions
from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.distributed import (
    LOCAL,
    Communicator,
    GradientScale,
    check_agreement,
    ends_together,
    synchronize,
)
from rlobjectives.errors import (
    CapabilityError,
    CheckpointError,
    MissingColumnError,
    NonFiniteError,
    RankError,
    RLObjectivesError,
    ShapeError,
    UnknownAlgorithmError,
    WindowError,
)
from rlobjectives.estimators import *
from rlobjectives.layouts import PackedLayout, PaddedLayout, TokenLayout
from rlobjectives.losses import *
from rlobjectives.objective import Objective
from rlobjectives.reductions import *
from rlobjectives.registry import ALGORITHMS, AlgorithmSpec
from rlobjectives.rollouts import Groups, Rollouts
from rlobjectives.scores import reward_matrix
from rlobjectives.statistics import LogSum, Maximum, Mean, Minimum, Moments, Stat, Sum
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import ObjectiveOutput, Window, WindowBuilder, merge_reports

_moved.install()

__version__ = "0.1.0"

# The parts are whatever their rooms name; pure functions are in `functional`.
_ROOMS = (estimators, losses, reductions)

__all__ = [
    *(name for room in _ROOMS for name in room.__all__ if not name.islower()),
    "ALGORITHMS",
    "LOCAL",
    "AlgorithmSpec",
    "Capabilities",
    "CapabilityError",
    "CheckpointError",
    "Communicator",
    "Component",
    "GradientScale",
    "Groups",
    "LogSum",
    "Maximum",
    "Mean",
    "Metric",
    "Minimum",
    "MissingColumnError",
    "Moments",
    "NonFiniteError",
    "Objective",
    "ObjectiveOutput",
    "PackedLayout",
    "PaddedLayout",
    "RLObjectivesError",
    "RankError",
    "Rollouts",
    "ShapeError",
    "Stat",
    "Sum",
    "TokenBatch",
    "TokenLayout",
    "TrainerFacts",
    "UnknownAlgorithmError",
    "Window",
    "WindowBuilder",
    "WindowContext",
    "WindowError",
    "advantage_metrics",
    "check_agreement",
    "ends_together",
    "functional",
    "group_metrics",
    "length_metrics",
    "merge_reports",
    "reward_matrix",
    "reward_metrics",
    "synchronize",
    "value_metrics",
]
