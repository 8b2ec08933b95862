"""The exception family: every error is also the standard-library error it refines.

A message says what is wrong, what was got and expected, where, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "CapabilityError",
    "CheckpointError",
    "MissingColumnError",
    "NonFiniteError",
    "RLObjectivesError",
    "RankError",
    "ShapeError",
    "UnknownAlgorithmError",
    "WindowError",
]


class RLObjectivesError(Exception):
    """Base of every error this library raises on purpose."""


class ShapeError(RLObjectivesError, ValueError):
    """Two tensors that must have the same shape (or a tensor and its layout) do not."""


class NonFiniteError(RLObjectivesError, ValueError):
    """A NaN or an infinity stands at a place that counts, or a log-probability above 0."""


class CapabilityError(RLObjectivesError, ValueError):
    """The objective asks for something the trainer, the data or another part cannot give."""


class CheckpointError(CapabilityError):
    """A checkpoint is half, damaged, of another run, or cannot be written where it should be."""


class MissingColumnError(RLObjectivesError, LookupError):
    """A part reads a column (log-probabilities, values, rewards …) that was not given."""


class UnknownAlgorithmError(RLObjectivesError, LookupError):
    """A name is neither a registered algorithm nor an importable ``package.module:Class``."""


class WindowError(RLObjectivesError, RuntimeError):
    """A window is used against its life cycle, such as a second backward through one loss."""


class RankError(RLObjectivesError, RuntimeError):
    """Another rank failed or disagrees, so this rank stops at the same point."""
