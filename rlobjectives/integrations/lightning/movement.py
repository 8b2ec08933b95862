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
    """Warns once if gradients have not moved some weights after a number of steps that should have.

    A head that stays where it started gives values without meaning, and advantages that are plain rewards; training
    goes on without an error. Weight decay moves weights too, so they must have changed *and* have seen a gradient other
    than 0. Each rank looks at the shard it keeps and at the gradients of its own micro-batches, wherever the strategy
    takes those afterwards; one collective joins what they found, once.

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
        self._hooks: list[Any] = [self._listen(one) for one, _ in self._watched if one.requires_grad]
        self._device = self._watched[0][1].device if self._watched else torch.device("cpu")
        self._pulled = torch.zeros((), dtype=torch.bool, device=self._device)
        self._name = name
        self._communicator = communicator
        self._steps = steps
        self._left = steps

    def _listen(self, parameter: Any) -> Any:
        fsdp2 = isinstance(parameter, DTensor)
        if fsdp2:  # forwards use other tensors, and this one is given the reduced gradient
            return parameter.register_post_accumulate_grad_hook(lambda one: self._note(one.grad))
        return parameter.register_hook(self._note)  # before ZeRO takes the gradient away

    def _note(self, gradient: Any) -> None:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local is not None:
            self._pulled = self._pulled | (local.detach() != 0).any().to(self._device)

    def stepped(self) -> None:
        """Count one eligible step: one that was taken, with the weights in its loss."""
        self._left -= 1
        if self._left != 0:
            return
        for hook in self._hooks:
            hook.remove()
        changed = [not torch.equal(local_shard(parameter), start) for parameter, start in self._watched]
        self._watched, self._hooks = [], []
        found = {
            "moved": Sum.of(torch.tensor(changed, dtype=torch.float64, device=self._device)),
            "pulled": Sum.of(self._pulled.double().reshape(1)),
        }
        merged = synchronize(found, self._communicator)
        if not bool(merged["moved"].row[0] > 0):
            rank_zero_warn(
                f"{self._name} has not moved in {self._steps} optimizer steps, so the critic learns nothing. Usual "
                "causes: a learning rate of 0, weights that are missing from the optimizer or frozen, values that were "
                "detached, or a value loss whose coef is 0."
            )
        elif not bool(merged["pulled"].row[0] > 0):
            rank_zero_warn(
                f"{self._name} has had no gradient in {self._steps} optimizer steps, only weight decay, so the critic "
                "learns nothing. Usual causes: values that were detached, or a value loss whose coef is 0."
            )
