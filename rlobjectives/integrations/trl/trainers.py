"""Trainers ready to use."""

from __future__ import annotations

from trl import GRPOTrainer, RLOOTrainer

from rlobjectives.integrations.trl.mixin import ObjectiveMixin

__all__ = ["ObjectiveGRPOTrainer", "ObjectiveRLOOTrainer"]


class ObjectiveGRPOTrainer(ObjectiveMixin, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with any objective: ``ObjectiveGRPOTrainer(objective="gdpo", model=..., ...)``.

    See `ObjectiveMixin`.
    """


class ObjectiveRLOOTrainer(ObjectiveMixin, RLOOTrainer):  # type: ignore[misc]
    """`RLOOTrainer` with any objective that reads no sampler's log-probabilities.

    Its ``beta`` (0.05 by default) becomes the objective's `KLPenalty`, in the loss; `RLOOTrainer` alone subtracts the
    divergence from the reward. It hands out no per-token old log-probabilities, so they are computed once more when
    the window is not aligned with generation. `ObjectiveGRPOTrainer` with ``objective="rloo"`` trains the same and
    does not.
    """
