"""Validation scores: summed over batches on each rank, merged over ranks once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from rlobjectives.causal_lm.prompts import PromptBatch
from rlobjectives.causal_lm.transcript import Transcript
from rlobjectives.checks import check_number, check_positive_int
from rlobjectives.distributed import Communicator, Fault
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.integrations.lightning.engine import make_engine
from rlobjectives.integrations.lightning.randomness import base_seed, derive_seed, seeded
from rlobjectives.statistics import Mean, Stat, measured_values

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    _Base = LightningModule
else:
    _Base = object

__all__ = ["CompletionValidation", "ValidationScores"]


class ValidationScores:
    """Mean of each reward, and accuracy by the first, over all counted prompts of all ranks, among those scored.

    Args:
        accuracy_threshold: First reward at which a completion counts as right.
    """

    def __init__(self, accuracy_threshold: float) -> None:
        self._threshold = accuracy_threshold
        self._found: dict[str, Stat] = {}
        self._fault = Fault()

    def guard(self) -> AbstractContextManager[None]:
        """Score a batch of this rank; `finish` raises what goes wrong on all ranks, so that none waits for another."""
        return self._fault.guard()

    def add(self, prefix: str, transcript: Transcript, counted: Sequence[bool]) -> None:
        """Take in one batch; fillers are left out.

        Args:
            prefix: What metric names start with.
            transcript: Scored completions.
            counted: One flag per completion.
        """
        flags = torch.tensor(counted)
        stats: dict[str, Stat] = {f"{prefix}/accuracy": transcript.accuracy(self._threshold, flags)}
        for column, name in enumerate(transcript.reward_names):
            stats[f"{prefix}/{name}"] = Mean.of(
                transcript.rewards[:, column], transcript.scored[:, column] & flags
            )
        for name, stat in stats.items():
            self._found[name] = self._found[name].merge(stat) if name in self._found else stat

    def finish(self, communicator: Communicator) -> dict[str, float]:
        """Merge over ranks, in one collective, and start anew; equal on every rank.

        Raises:
            Exception: What went wrong in a `guard` of this rank; `RankError` on the others.
        """
        found, fault = self._found, self._fault
        self._found, self._fault = {}, Fault()
        return measured_values(exchange(found, communicator, fault=fault).statistics)


class CompletionValidation(_Base):
    """The validation and the test of a module that completes prompts: greedily, and by drawing if asked to.

    The module supplies `sample` and `transcribe`; see `CausalLMPolicy` for what is logged.
    """

    seed: int | None
    sample: Any
    transcribe: Any

    def prepare_validation(self, *, accuracy_threshold: float, val_samples: int) -> None:
        """Set what to measure; called by the module's ``__init__``."""
        if val_samples != 0:
            check_positive_int("val_samples (0 draws none)", val_samples)
        check_number("accuracy_threshold", accuracy_threshold)
        self.accuracy_threshold = accuracy_threshold
        self.val_samples = val_samples
        self.last_validation: Transcript | None = None
        self.validation_history: list[tuple[int, dict[str, float]]] = []
        self._validation = ValidationScores(accuracy_threshold)

    def validation_step(self, batch: PromptBatch, batch_idx: int = 0) -> None:
        """Complete the prompts, and score the completions."""
        self._measure("val", batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Merge all batches and ranks, and log."""
        metrics = self._finish()
        if metrics:
            self.validation_history.append((int(self.trainer.global_step), metrics))

    def test_step(self, batch: PromptBatch, batch_idx: int = 0) -> None:
        """Measure the test prompts as validation measures its own."""
        self._measure("test", batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Merge all batches and ranks, and log."""
        self._finish()

    def _measure(self, part: str, batch: PromptBatch, batch_idx: int) -> None:
        make_engine(self).settle()
        # Drawn from a seed of their own, so that validating does not change what training draws.
        seed = derive_seed(base_seed(self.seed), "validation", batch_idx, self.global_rank)
        with seeded(seed), self._validation.guard():
            # Ranks may have to sample together: a rank whose rewards fail does not stay behind in any of it.
            *_, greedy = self.sample(batch, greedy=True)
            drawn = self.sample(batch, self.val_samples)[-1] if self.val_samples else None
            transcript: Transcript = self.transcribe(batch, greedy)
            self._validation.add(part, transcript, batch.counted)
            if part == "val":
                self.last_validation = transcript
            if drawn is not None:
                several = self.transcribe(batch, drawn, self.val_samples)
                counted = [flag for flag in batch.counted for _ in range(self.val_samples)]
                self._validation.add(f"{part}/sampled", several, counted)

    def _finish(self) -> dict[str, float]:
        metrics = self._validation.finish(Communicator.world())
        self.log_dict(metrics, batch_size=1)
        return metrics
