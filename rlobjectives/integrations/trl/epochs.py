"""A run that resumes in a later epoch sees the prompts of that epoch, and not those of the first again."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

__all__ = ["EpochsDone"]


class EpochsDone(TrainerCallback):
    """Draws the permutations of the epochs that are over before a resumed run draws its own.

    TRL's sampler shuffles anew at the beginning of each epoch, from a generator that begins with the run. The Trainer skips
    the batches of the epoch in which it resumes, and not the permutations of those before (transformers 5): so the prompts
    of the first epoch come once more, and those of this one are lost.

    Attributes:
        sampler: The run's, as TRL made it; set when the data loader is made.
    """

    sampler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Catch up. The state is that of the checkpoint by now, and no batch has been asked for."""
        del args, control, kwargs
        generator = getattr(self.sampler, "generator", None)
        if generator is None:  # it does not shuffle
            return
        for _ in range(int(state.epoch or 0)):
            torch.randperm(self.sampler.num_samples, generator=generator)
