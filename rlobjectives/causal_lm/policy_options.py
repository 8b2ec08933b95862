"""What can be said about a policy's options and its model before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlobjectives.checks import check_number, check_positive_int, suggestion
from rlobjectives.errors import CapabilityError

__all__ = ["check_fits", "check_optimizer_options", "fresh_config"]


def check_optimizer_options(
    *, learning_rate: object, weight_decay: object, betas: Sequence[object], warmup_steps: object
) -> None:
    """Raise a `CapabilityError` for an option of AdamW that is out of range."""
    check_number("learning_rate", learning_rate, low=0.0)
    check_number("weight_decay", weight_decay, low=0.0)
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise CapabilityError(f"betas is {betas!r}; expected two numbers, such as (0.9, 0.999).")
    for position, beta in enumerate(betas):
        check_number(f"betas[{position}]", beta, low=0.0, high=1.0, open_high=True)
    if warmup_steps != 0 or isinstance(warmup_steps, (bool, float)):
        check_positive_int("warmup_steps (0 for none)", warmup_steps)


def fresh_config(fields: Mapping[str, Any]) -> Any:
    """The configuration object of a model with random weights.

    Args:
        fields: ``model_type`` and fields of its configuration class.

    Raises:
        CapabilityError: If the type is missing or unknown, or has no such field.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = dict(fields)
    kind = given.pop("model_type", None)
    if kind is None:
        raise CapabilityError("model_config has no model_type; expected for example model_type: llama.")
    if kind not in CONFIG_MAPPING:
        raise CapabilityError(
            f"model_config.model_type is {kind!r}, which transformers does not know."
            f"{suggestion(kind, CONFIG_MAPPING.keys(), '')}"
        )
    plain, found = AutoConfig.for_model(kind), AutoConfig.for_model(kind, **given)
    # What a class reads becomes a field of every object, or, as the names of older releases do, something else; what
    # it does not read just sticks to the object.
    for name in given:
        if name in vars(found) and not hasattr(plain, name):
            raise CapabilityError(
                f"model_config has the field {name!r}, which {type(plain).__name__} does not have."
                f"{suggestion(name, [*vars(plain), *type(plain).attribute_map], '')}"
            )
    return found


def check_fits(model: Any, tokenizer: Any, *, max_prompt_tokens: int | None, max_new_tokens: int) -> None:
    """Compare a model with its tokenizer and with the longest sequence it will see, as far as both are known.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        max_prompt_tokens: Longest prompt; None: not known.
        max_new_tokens: Longest completion.

    Raises:
        CapabilityError: If some token has no embedding, or the longest sequence has more tokens than there are
            positions.
    """
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if isinstance(rows, int) and 0 < rows < len(tokenizer):
        raise CapabilityError(
            f"The model has embeddings for {rows} tokens; the tokenizer has {len(tokenizer)}. Use the tokenizer that "
            f"belongs to the model, or a vocab_size of at least {len(tokenizer)}."
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = (max_prompt_tokens or 1) + max_new_tokens
    if isinstance(positions, int) and 0 < positions < longest:
        prompt = (
            "1 for the shortest prompt"
            if max_prompt_tokens is None
            else f"max_prompt_tokens {max_prompt_tokens}"
        )
        raise CapabilityError(
            f"The model has {positions} positions (max_position_embeddings); a sequence may have {longest} tokens "
            f"({prompt}, max_new_tokens {max_new_tokens}). Shorten one, or choose another model."
        )
