"""Reductions: how much each token's loss counts in the window."""

from rlobjectives.reductions.base import LossReduction
from rlobjectives.reductions.fixed_budget import FixedBudget
from rlobjectives.reductions.length_power import LengthPower
from rlobjectives.reductions.prompt_mean import PromptMean
from rlobjectives.reductions.sequence_mean import SequenceMean, SequenceSum
from rlobjectives.reductions.token_mean import TokenMean

__all__ = [
    "FixedBudget",
    "LengthPower",
    "LossReduction",
    "PromptMean",
    "SequenceMean",
    "SequenceSum",
    "TokenMean",
]
