"""rlobjectives: RL objectives for language models, as parts for the trainer you already have."""

from rlobjectives import functional
from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.distributed import LOCAL, Communicator, GradientScale, synchronize
from rlobjectives.errors import (
    CapabilityError,
    MissingColumnError,
    NonFiniteError,
    RankError,
    RLObjectivesError,
    ShapeError,
    UnknownAlgorithmError,
    WindowError,
)
from rlobjectives.estimators import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    BatchBaseline,
    Combined,
    Estimator,
    MaxRL,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    TDLambda,
    TeacherSignal,
    VTrace,
    reward_metrics,
)
from rlobjectives.layouts import PackedLayout, PaddedLayout, TokenLayout
from rlobjectives.losses import (
    ClippedSurrogate,
    KLPenalty,
    PolicyLoss,
    Reinforce,
    TokenLoss,
    TokenTerm,
)
from rlobjectives.objective import Objective
from rlobjectives.reductions import (
    FixedBudget,
    LossReduction,
    PromptMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from rlobjectives.registry import ALGORITHMS, AlgorithmSpec
from rlobjectives.rollouts import Groups, Rollouts, reward_matrix
from rlobjectives.statistics import LogSum, Maximum, Mean, Moments, Stat, Sum
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import ObjectiveOutput, Window, WindowBuilder

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "LOCAL",
    "OPO",
    "RLOO",
    "AlgorithmSpec",
    "BatchBaseline",
    "Capabilities",
    "CapabilityError",
    "ClippedSurrogate",
    "Combined",
    "Communicator",
    "Component",
    "Estimator",
    "FixedBudget",
    "GradientScale",
    "Groups",
    "KLPenalty",
    "LogSum",
    "LossReduction",
    "MaxRL",
    "Maximum",
    "Mean",
    "Metric",
    "MissingColumnError",
    "Moments",
    "NonFiniteError",
    "Objective",
    "ObjectiveOutput",
    "OptimalTokenBaseline",
    "PackedLayout",
    "PaddedLayout",
    "PassAtK",
    "PolicyLoss",
    "PromptMean",
    "RLObjectivesError",
    "RankError",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rollouts",
    "SequenceMean",
    "SequenceSum",
    "ShapeError",
    "Stat",
    "Sum",
    "TDLambda",
    "TeacherSignal",
    "TokenBatch",
    "TokenLayout",
    "TokenLoss",
    "TokenMean",
    "TokenTerm",
    "TrainerFacts",
    "UnknownAlgorithmError",
    "VTrace",
    "Window",
    "WindowBuilder",
    "WindowContext",
    "WindowError",
    "functional",
    "reward_matrix",
    "reward_metrics",
    "synchronize",
]
