"""Why a model may fail its self-test, from what it looks like, and what to do about it."""

from __future__ import annotations

from torch import nn

from rlobjectives.integrations.transformers.keywords import class_name, forward_keywords, unwrapped

__all__ = ["suspected_cause"]

_OTHER = "Choose another model, or another version of transformers."


def suspected_cause(model: nn.Module, failed: set[str], *, finite: bool = True) -> tuple[str, str]:
    """The likely reason of a failed self-test, and what to do.

    Args:
        model: The model.
        failed: What differs by more than rounding: ``"left"``, ``"right"`` (padding), ``"sampled"``.
        finite: Whether all numbers are.

    Returns:
        Two sentences.
    """
    if not finite:
        return (
            "numbers that are not finite: weights that have diverged or were not loaded whole, too narrow a precision, "
            "or an attention that gives NaN beside padding.",
            "Look at the model's logits for one sequence; try float32 or another attn_implementation.",
        )
    known, inside = forward_keywords(model), unwrapped(model)
    stateful = bool(getattr(inside, "_is_stateful", False) or {"state", "cache_params"} & known)
    if "left" in failed and "position_ids" not in known and (hidden := _hidden(model)):
        return (
            f"position ids. {hidden} takes position_ids, but {type(model).__name__}.forward around it does not name "
            "or pass them on, so tokens behind padding stand at other positions.",
            "Let the wrapper's forward take **kwargs and pass them on.",
        )
    if "left" in failed and stateful:
        return (
            "recurrent state. Padding before a sequence changes the state that its tokens read.",
            f"Use prompts of one length. {_OTHER}",
        )
    if "left" in failed and "position_ids" not in known:
        return (
            "position ids. The forward takes none, so tokens behind padding stand at other positions.",
            f"Use prompts of one length. {_OTHER}",
        )
    attention = getattr(getattr(inside, "config", None), "_attn_implementation", None)
    ways = f"Try another attn_implementation than {attention!r} ('eager', 'sdpa', 'flash_attention_2')."
    if "left" in failed:
        return (
            "attention implementation. Padding is attended to although attention_mask marks it, or the scoring forward "
            "does not pass position_ids.",
            f"{ways} {_OTHER}",
        )
    if "right" in failed:
        return (
            "attention implementation. A token depends on what stands behind it: attention is not causal, or "
            "something is averaged over the tokens of a sequence.",
            f"{ways} {_OTHER}",
        )
    if stateful:
        return (
            "recurrent state. A step from the cache carries on another state than a whole forward has.",
            _OTHER,
        )
    return (
        "the key-value cache. A step from the cache sees other positions, another mask or another cache than a whole "
        "forward, or the scoring forward computes logits in another way than the model's own forward.",
        f"{ways} {_OTHER}",
    )


def _hidden(model: nn.Module) -> str:
    """The class of a module inside that takes ``position_ids`` where the model itself does not; "" if there is none."""
    for part in model.modules():
        names = forward_keywords(part) if part is not model else frozenset()
        if {"input_ids", "position_ids"} <= names and hasattr(part, "get_output_embeddings"):
            return class_name(part)
    return ""
