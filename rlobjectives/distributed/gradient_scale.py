"""GradientScale: the one owner of what a backend silently divides gradients by."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rlobjectives.checks import check_positive_int

__all__ = ["GradientScale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientScale:
    """Factor on each local loss so that the accumulated gradient is that of the window's loss.

    A window loss is a partial *sum* that is already divided by the window. Backends average gradients
    over ranks and often divide by the accumulation steps as well; both must be undone, exactly once.

    ``Accelerator(gradient_accumulation_steps=2)`` is such a backend: its ``backward`` divides every loss by 2, so
    without ``accumulation_divisor=2`` the gradient is half of what it should be.

    Args:
        averaged_ranks: Ranks over which the backend *averages* gradients (1 if it sums or is alone).
        accumulation_divisor: What else it divides each micro-batch's loss by: accelerate's
            ``gradient_accumulation_steps``, DeepSpeed's where its engine scales by it; 1 where nothing does.

    Source:
        Factors measured on Lightning 2.6, DeepSpeed 0.19 and accelerate 1.15: W under manual
        optimization; W·k under accelerate or a DeepSpeed engine that scales by its accumulation; W·k² under
        Lightning's automatic optimization with DeepSpeed.

    Example:
        >>> GradientScale(averaged_ranks=4, accumulation_divisor=2).factor
        8
    """

    averaged_ranks: int = 1
    accumulation_divisor: int = 1

    def __post_init__(self) -> None:
        check_positive_int("averaged_ranks", self.averaged_ranks)
        check_positive_int("accumulation_divisor", self.accumulation_divisor)

    @property
    def factor(self) -> int:
        """What to multiply the local loss by."""
        return self.averaged_ranks * self.accumulation_divisor

    @classmethod
    def for_ddp(cls, world_size: int | None = None) -> GradientScale:
        """DDP, FSDP and ZeRO without a divisor of their own: they average over all ranks.

        Args:
            world_size: Ranks that average; by default those of the default process group, or 1.
        """
        if world_size is None:
            world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return cls(averaged_ranks=world_size)
