"""Validation scores: summed over batches on each rank, merged over ranks once at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlobjectives.distributed import Communicator, synchronize
from rlobjectives.integrations.lightning.transcript import Transcript
from rlobjectives.statistics import Mean, Stat

__all__ = ["ValidationScores", "measured_values"]


class ValidationScores:
    """Mean of each reward, and accuracy, over all counted prompts of all ranks.

    Args:
        accuracy_threshold: First reward at which a completion counts as right.
    """

    def __init__(self, accuracy_threshold: float) -> None:
        self._threshold = accuracy_threshold
        self._found: dict[str, Stat] = {}

    def add(self, prefix: str, transcript: Transcript, counted: Sequence[bool]) -> None:
        """Take in one batch; fillers are left out.

        Args:
            prefix: What metric names start with.
            transcript: Scored completions.
            counted: One flag a completion.
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
        """Merge over ranks, in one collective, and start anew; equal on every rank."""
        found, self._found = self._found, {}
        return measured_values(synchronize(found, communicator)) if found else {}


def measured_values(statistics: Mapping[str, Stat]) -> dict[str, float]:
    """The numbers behind merged statistics; one over nothing is left out."""
    numbers: dict[str, float] = {}
    for name, stat in statistics.items():
        if bool(stat.measured):
            numbers.update({label: float(number) for label, number in stat.report(name).items()})
    return numbers
