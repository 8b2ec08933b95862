"""Building a causal language model and its tokenizer from what a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlobjectives.causal_lm.policy_options import fresh_config
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.randomness import seeded

__all__ = ["build_model", "build_tokenizer", "encode_prompts", "end_ids"]


_TRAINABLE = (torch.bfloat16, torch.float32, torch.float64)


def build_model(
    *,
    model_name_or_path: str | None,
    model_config: Mapping[str, Any] | None,
    gguf_file: str | None,
    dtype: str,
    model_options: Mapping[str, Any] | None,
    seed: int,
) -> Any:
    """Load a pretrained causal language model, or make a fresh one from a configuration.

    Args:
        model_name_or_path: Name or folder, as for ``AutoModelForCausalLM.from_pretrained``.
        model_config: ``model_type`` and the fields of its configuration class, for a model with random weights.
        gguf_file: File with quantised weights inside `model_name_or_path`; they are expanded to `dtype`.
        dtype: Name of the weights' torch dtype.
        model_options: Further arguments of ``from_pretrained`` or ``from_config``.
        seed: Seeds random weights, so that every rank makes the same ones.

    Returns:
        The model, on the CPU.

    Raises:
        CapabilityError: If not exactly one of the two sources is given, a name is unknown, or weights of that
            dtype cannot be trained.
    """
    from transformers import AutoModelForCausalLM

    if (model_name_or_path is None) == (model_config is None):
        given = "neither" if model_config is None else "both"
        raise CapabilityError(
            f"The model is given by model_name_or_path or by model_config; got {given}. Give exactly one."
        )
    given_twice = {"dtype", "torch_dtype"} & (model_options or {}).keys()
    if given_twice:
        raise CapabilityError(
            f"model_options has {', '.join(sorted(given_twice))}. Give dtype itself instead."
        )
    options = {"dtype": _dtype(dtype), **(model_options or {})}
    with seeded(seed):
        if model_name_or_path is not None:
            if gguf_file is not None:
                options["gguf_file"] = gguf_file
            return _loaded(AutoModelForCausalLM, model_name_or_path, options)
        config = fresh_config(model_config or {})
        try:
            return AutoModelForCausalLM.from_config(config, **options)
        except (TypeError, ValueError) as error:
            raise CapabilityError(
                f"No model can be made from model_config {dict(model_config or {})} and model_options "
                f"{dict(model_options or {})}: {error}"
            ) from error


def build_tokenizer(name_or_path: str, *, gguf_file: str | None = None) -> Any:
    """Load a tokenizer that pads on the left; without a padding token it pads with the end-of-sequence token.

    Raises:
        CapabilityError: If it has no end-of-sequence token: completions would never end.
    """
    from transformers import AutoTokenizer

    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer = _loaded(AutoTokenizer, name_or_path, options)
    if tokenizer.eos_token_id is None:
        raise CapabilityError(
            f"The tokenizer of {name_or_path!r} has no end-of-sequence token, so completions would never end. "
            "Set its eos_token and save it."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def _loaded(kind: Any, name_or_path: str, options: Mapping[str, Any]) -> Any:
    try:
        return kind.from_pretrained(name_or_path, **options)
    except OSError as error:
        raise CapabilityError(
            f"Cannot load {name_or_path!r} with {kind.__name__}: {error} Give a folder made by save_pretrained, "
            "or a model's name on the hub."
        ) from error
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name} = {value!r}" for name, value in options.items())
        raise CapabilityError(
            f"Cannot load {name_or_path!r} with {kind.__name__} and {shown or 'no options'}: {error}"
        ) from error


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype | None = getattr(torch, name, None)
    if found is torch.float16:
        raise CapabilityError(
            "dtype is 'float16', whose range is too small for weights that are trained: without loss scaling, "
            "which is not done here, they become NaN. Use 'bfloat16' or 'float32'."
        )
    if found is None or found not in _TRAINABLE:
        raise CapabilityError(
            f"dtype is {name!r}; expected a torch dtype that weights can be trained in: "
            f"{', '.join(repr(str(one).removeprefix('torch.')) for one in _TRAINABLE)}."
        )
    return found


def end_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Every id that ends a completion, by the tokenizer and by the model's generation settings."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    extra = configured if isinstance(configured, (list, tuple)) else [configured]
    return sorted({tokenizer.eos_token_id, *(one for one in extra if one is not None)})


def encode_prompts(tokenizer: Any, prompts: list[Any], *, max_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Token ids and mask of prompts, padded on the left.

    Args:
        tokenizer: From `build_tokenizer`.
        prompts: Strings, taken as they are, or lists of chat messages, put into the tokenizer's chat template.
        max_tokens: Longest prompt; a longer one is an error rather than cut in silence. None: no limit.

    Returns:
        Ids and mask, int64 ``[n, p]``.

    Raises:
        CapabilityError: If a prompt is too long, empty, or neither a string nor messages.
    """
    rows = [_encode(tokenizer, prompt) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row or (max_tokens is not None and len(row) > max_tokens):
            raise CapabilityError(
                f"A prompt has {len(row)} tokens; expected 1 to {max_tokens or 'any number'}: {str(prompt)[:80]!r}. "
                "Filter the data, or raise max_prompt_tokens."
            )
    width = max(map(len, rows), default=1)
    ids = torch.tensor(
        [[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows], dtype=torch.long
    )
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], dtype=torch.long)
    return ids.reshape(len(rows), width), mask.reshape(len(rows), width)


def _encode(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(turn, dict) and "role" in turn for turn in prompt)
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise CapabilityError(
                "A prompt is a list of chat messages, and the tokenizer has no chat template. Set tokenizer.chat_template, or "
                "give prompts as strings."
            )
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    shown = "an empty list" if prompt == [] else f"a {type(prompt).__name__}"
    raise CapabilityError(
        f"A prompt is {shown}; expected a string, or a list of messages with role and content."
    )
