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
from rlobjectives.estimators import GDPO, GRPO, RLOO, Estimator, reward_metrics
from rlobjectives.layouts import PackedLayout, PaddedLayout, TokenLayout
from rlobjectives.losses import (
    M2PO,
    OPSM,
    P3O,
    ClippedSurrogate,
    Distillation,
    DivergenceDistillation,
    ImportanceCorrection,
    KLPenalty,
    PolicyLoss,
    Reinforce,
    Rejection,
    ReverseKLDistillation,
    TokenLoss,
    TokenPart,
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
    "GDPO",
    "GRPO",
    "LOCAL",
    "M2PO",
    "OPSM",
    "P3O",
    "RLOO",
    "AlgorithmSpec",
    "Capabilities",
    "CapabilityError",
    "ClippedSurrogate",
    "Communicator",
    "Component",
    "Distillation",
    "DivergenceDistillation",
    "Estimator",
    "FixedBudget",
    "GradientScale",
    "Groups",
    "ImportanceCorrection",
    "KLPenalty",
    "LogSum",
    "LossReduction",
    "Maximum",
    "Mean",
    "Metric",
    "MissingColumnError",
    "Moments",
    "NonFiniteError",
    "Objective",
    "ObjectiveOutput",
    "PackedLayout",
    "PaddedLayout",
    "PolicyLoss",
    "PromptMean",
    "RLObjectivesError",
    "RankError",
    "Reinforce",
    "Rejection",
    "ReverseKLDistillation",
    "Rollouts",
    "SequenceMean",
    "SequenceSum",
    "ShapeError",
    "Stat",
    "Sum",
    "TokenBatch",
    "TokenLayout",
    "TokenLoss",
    "TokenMean",
    "TokenPart",
    "TokenTerm",
    "TrainerFacts",
    "UnknownAlgorithmError",
    "Window",
    "WindowBuilder",
    "WindowContext",
    "WindowError",
    "functional",
    "reward_matrix",
    "reward_metrics",
    "synchronize",
]
