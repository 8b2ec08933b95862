"""The forward that scores sequences with a causal language model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.logprobs import sequence_logprobs

__all__ = ["score_sequences"]


def score_sequences(
    model: nn.Module, experience: Experience, *, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the action tokens, and entropies if asked for.

    Logits before the first action predict prompts, which nobody scores: a model that can is told to leave
    them out.

    Args:
        model: A Hugging Face causal language model.
        experience: Sequences; columns ``[n, t]``.
        temperature: The one they were sampled with.
        entropy: Whether to compute the entropy of each action's distribution.

    Returns:
        Log-probabilities and entropies (or None) in nats, ``[n, t]``, 0 where the layout's mask is false.
    """
    attention, mask = experience.attention_mask.long(), experience.layout.mask
    arguments: dict[str, Any] = {"input_ids": experience.input_ids, "attention_mask": attention}
    known = inspect.signature(model.forward).parameters
    first = 0
    if "position_ids" in known:
        # Counted from the first real token: prompts are padded on the left.
        arguments["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    if "logits_to_keep" in known:
        first = max(0, int(mask.any(0).int().argmax()) - 1)
        arguments["logits_to_keep"] = mask.shape[1] - first
    logits = model(**arguments, use_cache=False).logits
    logprobs, entropies = sequence_logprobs(
        logits,
        experience.input_ids[:, first:],
        temperature=temperature,
        mask=mask[:, first:],
        entropy=entropy,
    )
    return _widen(logprobs, first), None if entropies is None else _widen(entropies, first)


def _widen(column: Tensor, left: int) -> Tensor:
    return nn.functional.pad(column, (left, 0))
