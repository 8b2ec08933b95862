"""Communicator: the ranks that share a window, and how they exchange rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LOCAL", "Communicator", "gathered"]


class Communicator:
    """The data × context ranks over which one window spreads.

    This class and its neighbours in `rlobjectives.distributed` are the only code that calls
    ``torch.distributed``.

    Args:
        group: Process group of all ranks of the window; None with ``world_size`` 1 is a single process.
        context_group: Process group of the ranks that share each sequence's tokens; None without context
            parallelism. Its first rank counts the sequences; every rank counts its own tokens.
        device: Device that messages travel on; by default what the backend needs.

    Example:
        >>> Communicator().world_size, Communicator().owns_sequences
        (1, True)
    """

    def __init__(
        self,
        group: Any = None,
        *,
        context_group: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.group = group
        self.context_group = context_group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.owns_sequences = context_group is None or dist.get_rank(context_group) == 0
        self._device = None if device is None else torch.device(device)

    @classmethod
    def world(cls, *, context_group: Any = None, device: torch.device | str | None = None) -> Communicator:
        """All ranks of the default process group; a single process when none is initialised."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        return cls(group, context_group=context_group, device=device)

    @property
    def device(self) -> torch.device | None:
        """Device of the messages; None when any device will do (a single process)."""
        if self._device is not None or self.group is None:
            return self._device
        if "nccl" in str(dist.get_backend(self.group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def covers_run(self) -> bool:
        """Whether every rank of the run takes part in its exchanges."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return self._members >= ranks

    @property
    def _members(self) -> int:
        return self.world_size

    def global_rank(self, position: int) -> int:
        """The global rank of the rank at a position of `group`."""
        return position if self.group is None else dist.get_global_rank(self.group, position)

    def gather(self, row: Tensor) -> Tensor:
        """Every rank's row, in rank order, on every rank: ``[w]`` to ``[ranks, w]``. One collective."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        row = row.to(self.device).contiguous()
        return gathered(row, self.group, self.world_size)

    def say(self, text: str) -> list[str]:
        """Every rank's text, in rank order, on every rank. Two collectives; for ranks that are about to stop."""
        own = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([float(own.numel())], dtype=torch.float64))
        longest = int(sizes.max())
        rows = self.gather(torch.nn.functional.pad(own, (0, longest - own.numel())))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows.cpu()]

    def context_sum(self, per_sequence: Tensor) -> Tensor:
        """Differentiable sum over the context-parallel ranks; the identity without them."""
        if self.context_group is None:
            return per_sequence
        result: Tensor = _ContextSum.apply(per_sequence, self.context_group)  # type: ignore[no-untyped-call]
        return result


def gathered(row: Tensor, group: Any, ranks: int) -> Tensor:
    """Rows of all ranks of a group, ``[ranks, w]``."""
    # One flat buffer: gloo takes no other shape for it.
    rows = row.new_empty(ranks * row.numel())
    # Since torch 2.13 under a new name, and the old one warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, row, group=group)
    return rows.view(ranks, -1)


class _ContextSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss reads the same total, so a shard's gradient is the sum of all of theirs.
        gradient = grad_outputs[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


LOCAL = Communicator()
"""A single process."""
