"""Packed rows through a Hugging Face model, with proof that attention stays inside each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlobjectives.errors import CapabilityError
from rlobjectives.packing import Packing

__all__ = ["check_packing", "packed_logits"]

# What rounding may change between rows of different lengths. Eager attention takes its softmax in float32 even where
# the weights are float64.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4}
# What it may change between rows of one length, relative to the logits: nothing at all, unless tokens are dealt to
# experts, whose batches depend on all tokens.
_DEALING = {torch.float64: 1e-5, torch.float32: 1e-5}


def packed_logits(model: nn.Module, input_ids: Tensor, packing: Packing) -> Tensor:
    """Logits of every packed token, from one row that holds all sequences end to end.

    Run `check_packing` once on the model first: a model whose attention leaks across sequences gives
    logits that look fine and are wrong.

    Args:
        model: A causal language model that reads ``position_ids`` to tell sequences apart.
        input_ids: Padded ids ``[b, t]``.
        packing: How the rows are packed.

    Returns:
        ``[l, vocabulary]``; the logits at a sequence's place k predict its token k + 1. Differentiable.
    """
    output: Any = model(
        input_ids=packing.pack(input_ids).unsqueeze(0),
        position_ids=packing.position_ids.unsqueeze(0),
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits.squeeze(0)


def check_packing(model: nn.Module, vocabulary: int | None = None) -> None:
    """Refuse a model that lets packed sequences see each other.

    Two short sequences are run alone and packed, in evaluation mode and without gradient; their logits must agree.
    Then the first is exchanged for another of the same length, and the logits of the second must stay: that shows a
    leak far below rounding (a convolution of three tokens in an untrained model). Nothing about the architecture is
    assumed: a state that is carried across the boundary (Mamba), or an attention that ignores position ids, shows.
    Under ZeRO-3 and FSDP call it on all ranks.

    Args:
        model: The model.
        vocabulary: Size of the vocabulary, when ``model.config.vocab_size`` does not say it.

    Raises:
        CapabilityError: With the largest difference that was seen.

    Source:
        transformers builds block-diagonal attention from ``position_ids`` that start again at 0 when no
        attention mask is given; not every architecture does.
    """
    size = vocabulary or int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    device = next(model.parameters()).device
    ids = (torch.arange(12, device=device).view(2, 6) * 7 + 3) % size
    others = torch.cat([(ids[:1] + 1) % size, ids[1:]])
    packing = Packing(torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], device=device))
    second = int(packing.cu_seqlens[1])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            together, beside = (packed_logits(model, one, packing) for one in (ids, others))
            alone = torch.cat(
                [packed_logits(model, ids, Packing(_mask(packing, row), (row,))) for row in range(2)]
            )
    finally:
        model.train(training)
    size_of_logits = float(alone.abs().max())
    joined = float((together - alone).abs().max())
    exchanged = float((together - beside)[second:].abs().max())
    fits = joined <= _ROUNDING.get(together.dtype, 0.05) * max(1.0, size_of_logits)
    if not (fits and exchanged <= _DEALING.get(together.dtype, 0.01) * size_of_logits):
        raise CapabilityError(
            f"{type(model).__name__} lets packed sequences see each other: logits change by {joined:.2g} when another "
            f"sequence shares the row, and by {exchanged:.2g} when that one is exchanged. Use padded batches, or an "
            'attention that separates sequences by position ids (attn_implementation="sdpa", "flash_attention_2" …).'
        )


def _mask(packing: Packing, row: int) -> Tensor:
    lengths = packing.cu_seqlens.diff()
    return torch.arange(packing.shape[1], device=lengths.device) < lengths[row].expand(packing.shape[0], 1)
