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
    """`RLOOTrainer` with any objective that needs no reference policy.

    It hands out neither reference nor per-token old log-probabilities, so the latter are computed once more when
    the window is not aligned with generation. `ObjectiveGRPOTrainer` with ``objective="rloo"`` trains the same and
    does not.
    """
