"""An optimizer step that does not happen: for a window in which no token counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["StepSkipper"]


class StepSkipper:
    """Turns the next ``step()`` of an optimizer and its scheduler into nothing.

    A zero gradient is not a no-op: weight decay and momentum still move the weights and the schedule advances. The
    Trainer calls ``optimizer.step()`` and ``lr_scheduler.step()`` after the last micro-batch whatever happened before,
    so both are shadowed on the instance, once, and restored when the next window opens at the latest.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def arm(self, *owners: Any) -> None:
        """Make the next ``step`` of each owner a no-op.

        Owners that are None are left out, and so are schedules that step by a metric: the Trainer steps those after an
        evaluation, which takes place all the same.
        """
        self.disarm()
        for owner in owners:
            if owner is not None and "metrics" not in inspect.signature(owner.step).parameters:
                self._shadow(owner)

    def disarm(self) -> None:
        """Give every ``step`` back."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _shadow(self, owner: Any) -> None:
        had = "step" in vars(owner)
        before = vars(owner).get("step")

        def restore() -> None:
            if had:
                owner.step = before
            else:
                vars(owner).pop("step", None)

        def skipped(*_: object, **__: object) -> None:
            restore()

        owner.step = skipped
        self._undo.append(restore)


def forget_unscaled(scaler: Any, optimizer: Any) -> None:
    """Let a gradient scaler forget that this optimizer's gradients were unscaled for a step that was skipped.

    Args:
        scaler: The `GradScaler` of fp16 training, or None.
        optimizer: The optimizer inside any wrapper.
    """
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)  # no public way back
