"""Pipeline parallelism: the last stage knows the log-probabilities, every stage needs the window."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlobjectives.distributed.communicator import Communicator, gathered

__all__ = ["PipelineCommunicator"]

_HEADER = 6
_CODE, _SCHEMA = 0, 4
_FAILED = -1.0
_BETWEEN = "\x1d"  # the separator of groups


class PipelineCommunicator(Communicator):
    """A `Communicator` for ranks of a pipeline: statistics come from the last stage and reach all others.

    Every rank opens the same window. Ranks of the last stage add their micro-batches; the others add none.
    Each exchange is three messages: the stages of one pipeline tell each other whether anything went wrong (a
    row of seven numbers), the last stages exchange rows as without a pipeline, and each broadcasts them down
    its own. So an error on any stage of any pipeline is raised on every rank, at the same point.

    Args:
        group: Process group of the data × context ranks that are this rank's own stage; None when it is
            alone.
        pipeline_group: Process group of the stages of this rank's pipeline, in order of the stages.
        context_group: See `Communicator`.
        device: See `Communicator`.

    Example:
        >>> PipelineCommunicator.__mro__[1].__name__
        'Communicator'
    """

    def __init__(
        self,
        group: Any,
        pipeline_group: Any,
        *,
        context_group: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group, context_group=context_group, device=device)
        self.pipeline_group = pipeline_group
        self.stages = dist.get_world_size(pipeline_group)
        self.is_last_stage = dist.get_rank(pipeline_group) == self.stages - 1
        self._speakers: list[int] = []
        if self._device is None and "nccl" in str(dist.get_backend(pipeline_group)):
            self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def _members(self) -> int:
        return self.world_size * self.stages

    def global_rank(self, position: int) -> int:
        """The rank that speaks at a position: the last stage, or the stage of its pipeline that failed."""
        return self._speakers[position] if self._speakers else super().global_rank(position)

    def gather(self, row: Tensor) -> Tensor:
        """The last stage's rows, on every rank of every stage. Three collectives."""
        row = row.to(self.device or row.device).contiguous()
        row = self._heard(row)
        rows = row.new_empty(self.world_size, row.numel())
        if self.is_last_stage:
            rows = super().gather(row).to(row.device).contiguous()
        source = dist.get_global_rank(self.pipeline_group, self.stages - 1)
        dist.broadcast(rows, source, group=self.pipeline_group)
        self._speakers = [int(rank) for rank in rows[:, -1].tolist()]
        return rows[:, :-1]

    def say(self, text: str) -> list[str]:
        """The text of the stage that speaks at each position, on every rank of every stage."""
        mine = Communicator(self.pipeline_group, device=self._device).say(f"{dist.get_rank()} {text}")
        by_rank = dict(line.split(" ", 1) for line in mine)
        # Who speaks is known since the exchange before: a stage of each pipeline.
        spoken = next((by_rank[str(rank)] for rank in self._speakers if str(rank) in by_rank), "")
        texts = []
        if self.is_last_stage:
            texts = Communicator(self.group, device=self._device).say(spoken)
        everything = Communicator(self.pipeline_group, device=self._device).say(_BETWEEN.join(texts))
        return everything[-1].split(_BETWEEN)

    def _heard(self, row: Tensor) -> Tensor:
        # The row of this stage, with the header of the first stage that failed, and who it was.
        own = torch.cat([row[:_HEADER], row.new_tensor([float(dist.get_rank())])])
        headers = gathered(own, self.pipeline_group, self.stages)
        strange = (headers[:, _CODE] == 0) & (headers[:, _SCHEMA] != headers[-1, _SCHEMA])
        headers[:, _CODE] = torch.where(strange, _FAILED, headers[:, _CODE])
        bad = headers[:, _CODE] != 0
        speaker = torch.where(bad.any(), bad.to(torch.uint8).argmax(), self.stages - 1)
        chosen = headers[speaker]
        header = torch.where(headers[speaker, _CODE] != 0, chosen[:_HEADER], headers[-1, :_HEADER])
        return torch.cat([header, row[_HEADER:], chosen[_HEADER:]])
