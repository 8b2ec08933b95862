"""A watch over weights that should move: whether some did, on any rank, however they are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlobjectives.distributed import Communicator, synchronize
from rlobjectives.statistics import Sum

__all__ = ["MovementWatch", "local_shard"]


def local_shard(parameter: nn.Parameter) -> Tensor:
    """The part of a weight that this rank keeps: ZeRO-3's or FSDP2's shard, else all of it."""
    held: Any = parameter.detach()
    if hasattr(parameter, "ds_tensor"):  # between forwards, ZeRO-3 leaves the parameter itself empty
        held = parameter.ds_tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


class MovementWatch:
    """Warns once if none of some weights has changed after a number of steps that should have changed them.

    A head that stays where it started gives values without meaning, and advantages that are plain rewards; training
    goes on without an error. Each rank compares the shard it keeps, bit by bit; one collective joins them, once.

    Args:
        parameters: What to watch, for example a value head.
        name: What the warning calls it.
        steps: Optimizer steps after which to look.
        communicator: The ranks among which the weights are spread.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        name: str,
        steps: int = 5,
        communicator: Communicator,
    ) -> None:
        self._watched = [(parameter, local_shard(parameter).clone()) for parameter in parameters]
        self._name = name
        self._communicator = communicator
        self._steps = steps
        self._left = steps

    def stepped(self) -> None:
        """Count one eligible step: one that was taken, with the weights in its loss."""
        self._left -= 1
        if self._left != 0:
            return
        changed = [not torch.equal(local_shard(parameter), start) for parameter, start in self._watched]
        device = self._watched[0][1].device if self._watched else torch.device("cpu")
        found = Sum.of(torch.tensor(changed, dtype=torch.float64, device=device))
        self._watched = []
        moved = synchronize({"moved": found}, self._communicator)["moved"]
        if not bool(moved.row[0] > 0):
            rank_zero_warn(
                f"{self._name} has not moved in {self._steps} optimizer steps, so the critic learns nothing. Usual "
                "causes: a learning rate of 0, weights that are missing from the optimizer or frozen, values that were "
                "detached, or a value loss whose coef is 0."
            )
