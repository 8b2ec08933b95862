"""Options of Lightning's trainer that contradict manual optimization."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.engine import engine_type

__all__ = ["refuse_contradictions", "refuse_metric_schedulers"]


def refuse_contradictions(trainer: Any) -> None:
    """Refuse options that would have no effect or a wrong one, before Lightning does so less helpfully.

    Args:
        trainer: With its strategy chosen and not yet set up.

    Raises:
        CapabilityError: Naming the option and what to give instead.
    """
    if trainer.accumulate_grad_batches != 1:
        raise CapabilityError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) has no meaning here: a window is "
            "accumulated from micro-batches. Leave it at 1; micro_batch_size and windows_per_rollout of the module "
            "decide."
        )
    if trainer.gradient_clip_val:
        raise CapabilityError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) does not act on manual optimization. Give "
            f"gradient_clip_val={trainer.gradient_clip_val} to the module instead."
        )
    if str(trainer.precision) in ("16-mixed", "16-true"):
        raise CapabilityError(
            f"Trainer(precision={trainer.precision!r}) needs loss scaling, which ObjectiveMixin does not do. "
            "Use 'bf16-mixed', 'bf16-true' or '32-true'."
        )
    engine_type(trainer)


def refuse_metric_schedulers(trainer: Any) -> None:
    """Refuse schedulers that step by a metric.

    Args:
        trainer: With its optimizer set up.

    Raises:
        CapabilityError: If there is one.
    """
    if any(isinstance(one.scheduler, ReduceLROnPlateau) for one in trainer.lr_scheduler_configs):
        raise CapabilityError(
            "ReduceLROnPlateau waits for a metric; schedulers here step with the optimizer. "
            "Choose a scheduler that needs none."
        )
