"""The forward that scores sequences with a causal language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.transformers.keywords import forward_keywords, position_ids
from rlobjectives.integrations.transformers.value import aligned_values
from rlobjectives.logprobs import sequence_logprobs

__all__ = ["score_sequences", "score_sequences_with_values", "values_of_frozen_model"]


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
    first = _first_scored(model, experience)
    logits = _run(model, experience, first).logits
    return _read_logits(logits, experience, first, temperature, entropy)


def score_sequences_with_values(
    model: nn.Module,
    value_head: nn.Module,
    experience: Experience,
    *,
    temperature: float,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`score_sequences`, and values that a head reads from the hidden states of the same forward.

    Args:
        model: A Hugging Face causal language model.
        value_head: Hidden states to values, on top of the model's last layer.
        experience: Sequences; columns ``[n, t]``.
        temperature: The one they were sampled with.
        entropy: Whether to compute the entropy of each action's distribution.

    Returns:
        Log-probabilities, entropies (or None), and values ``[n, t]`` in reward units.
    """
    first = _first_scored(model, experience)
    output = _run(model, experience, first, output_hidden_states=True)
    values = aligned_values(value_head, output.hidden_states[-1], experience.attention_mask.long())
    return (*_read_logits(output.logits, experience, first, temperature, entropy), values)


def values_of_frozen_model(model: nn.Module, value_head: nn.Module, experience: Experience) -> Tensor:
    """Values ``[n, t]`` whose gradient ends at the head: the model runs without gradient and without logits."""
    with torch.no_grad():
        last = experience.input_ids.shape[1] - 1
        output = _run(model, experience, last, output_hidden_states=True)
    return aligned_values(value_head, output.hidden_states[-1], experience.attention_mask.long())


def _first_scored(model: nn.Module, experience: Experience) -> int:
    """Position of the first logits that predict an action; 0 for models that cannot leave any out."""
    if "logits_to_keep" not in forward_keywords(model):
        return 0
    return max(0, int(experience.layout.mask.any(0).int().argmax()) - 1)


def _run(model: nn.Module, experience: Experience, first: int, **options: Any) -> Any:
    attention = experience.attention_mask.long()
    arguments: dict[str, Any] = {"input_ids": experience.input_ids, "attention_mask": attention, **options}
    known = forward_keywords(model)
    if "position_ids" in known:
        arguments["position_ids"] = position_ids(attention)
    if "logits_to_keep" in known:
        arguments["logits_to_keep"] = attention.shape[1] - first
    if "use_cache" in known:
        arguments["use_cache"] = False
    return model(**arguments)


def _read_logits(
    logits: Tensor, experience: Experience, first: int, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logprobs, entropies = sequence_logprobs(
        logits,
        experience.input_ids[:, first:],
        temperature=temperature,
        mask=experience.layout.mask[:, first:],
        entropy=entropy,
    )
    return _widen(logprobs, first), None if entropies is None else _widen(entropies, first)


def _widen(column: Tensor, left: int) -> Tensor:
    return nn.functional.pad(column, (left, 0))
