"""Facts about whole sequences when context parallelism leaves a rank with shards of them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlobjectives.distributed.communicator import Communicator

__all__ = ["full_token_counts"]


def full_token_counts(local_counts: Tensor, communicator: Communicator) -> Tensor:
    """Counted tokens of each whole sequence from those of this rank's shard. One collective.

    Hand the result to the layout: ``layout.with_facts(total_tokens=counts)``. Every window
    needs it, since it counts the sequences that are not empty.

    Args:
        local_counts: ``layout.local_counts()`` of this rank, ``[n]``, the same sequences in the same
            order on every context-parallel rank.
        communicator: Knows the context-parallel group.

    Returns:
        Float64 ``[n]``.

    Example:
        >>> full_token_counts(torch.tensor([3.0]), Communicator()).tolist()
        [3.0]
    """
    return communicator.context_sum(local_counts.detach().to(torch.float64))
