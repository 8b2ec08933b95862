"""A test of the real model before training: padding and sampling must not change what it says of a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rlobjectives.distributed import replay
from rlobjectives.errors import CapabilityError, RLObjectivesError
from rlobjectives.integrations.transformers.diagnosis import suspected_cause
from rlobjectives.integrations.transformers.keywords import (
    class_name,
    forward_keywords,
    position_ids,
    unwrapped,
)
from rlobjectives.integrations.transformers.packed import check_packing
from rlobjectives.logprobs import sequence_logprobs

__all__ = ["Difference", "ModelCheck", "Sample", "Score", "check_model", "generated"]

Score: TypeAlias = Callable[[Tensor, Tensor], "Tensor | Mapping[str, Tensor]"]
Sample: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

LOGPROBS = "log-probabilities"
_SHORT, _LONG, _NEW = 5, 20, 4
_LIMITS = (
    "max_position_embeddings",
    "max_seq_len",
    "context_length",
)  # names of the longest sequence a model takes
# What rounding may change, on average over the tokens, relative to the largest number compared (1 at least). Measured
# on a CPU for float32: 1e-6. Eager attention takes its softmax in float32 even where the weights are float64.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Difference:
    """How far two ways to the same numbers are apart.

    Attributes:
        mean: Mean absolute difference over the tokens, in nats (values: in reward units).
        largest: Largest absolute difference.
        allowed: What `mean` may be: rounding in the precision of the model.
    """

    mean: float
    largest: float
    allowed: float

    @property
    def fits(self) -> bool:
        """Whether rounding explains it; never for NaN."""
        return self.mean <= self.allowed


@dataclass(frozen=True)
class ModelCheck:
    """What `check_model` has found.

    Attributes:
        differences: By what was compared: ``"log-probabilities, padded left"``, ``"log-probabilities, padded right"``,
            and ``"log-probabilities, sampled"`` if something was sampled.
        dtype: The precision whose rounding was allowed.
    """

    differences: Mapping[str, Difference]
    dtype: torch.dtype

    @property
    def failed(self) -> list[str]:
        """What differs by more than rounding."""
        return [name for name, one in self.differences.items() if not one.fits]


def check_model(
    model: nn.Module,
    *,
    score: Score | None = None,
    sample: Sample | None = None,
    samples: bool = True,
    packing: bool = False,
    vocabulary: int | None = None,
    avoid: Iterable[int] = (),
    pad_id: int | None = None,
    dtype: torch.dtype | None = None,
    hint: str = "",
) -> ModelCheck:
    """Refuse a model whose log-probabilities depend on padding, or on being sampled rather than scored.

    Two short sequences of different length are completed by the sampler, and scored in two forwards: the shorter one
    padded on the left, padded on the right and beside the longer, and then alone. All must agree up to rounding, and
    with what the sampler said of its tokens. Nothing about the architecture is assumed: lost position ids, a
    recurrent state that reads padding, an attention that ignores the mask, and cached steps that carry on something
    else than a whole forward, all show. In evaluation mode and without gradient; modes and random states are as before
    afterwards. Under ZeRO-3 and FSDP call it on all ranks.

    Rounding is allowed by precision, on average over the tokens and relative to the largest number compared (1 at
    least): 1e-4 in float64 and float32, 1e-2 in float16 and with TF32, 3e-2 in bfloat16 and for quantised weights.

    Args:
        model: A causal language model, wrapped (PEFT, ``torch.compile``, your own) or not.
        score: ``score(input_ids, attention_mask)``, int64 ``[n, t]`` each: log-probabilities ``[n, t]``, entry j of the
            token at j given its prefix; or several such columns by name. By default one forward, with position ids
            where the model takes them.
        sample: ``sample(prompt_ids, prompt_mask, count)``: exactly ``count`` tokens after each prompt, padded on the
            left, and their log-probabilities at the temperature of `score`, ``[n, count]`` each. By default the model's
            own ``generate``, if it has one.
        samples: Whether to compare sampling at all.
        packing: Whether to run `check_packing` too, for packed rows.
        vocabulary: Size of the vocabulary, when ``model.config.vocab_size`` does not say it.
        avoid: Token ids not to use in the sequences, besides the special ones that ``model.config`` names.
        pad_id: The padding token; by default the configuration's, or 0.
        dtype: The lowest precision anything is computed in; by default that of weights and autocast.
        hint: What else to say in an error.

    Returns:
        The differences, all explained by rounding.

    Raises:
        CapabilityError: If some are not: with the numbers, the suspected cause and what to do. Also if a forward or the
            sampler fails.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> found = check_model(LlamaForCausalLM(config))
        >>> found.differences["log-probabilities, padded left"].mean < 1e-4
        True
    """
    device = next(model.parameters()).device
    size = vocabulary or int(_config(model).vocab_size)
    pad = int((getattr(_config(model), "pad_token_id", None) or 0) if pad_id is None else pad_id)
    short, long = _prompts(model, size, {*avoid, pad})
    score = score or _scored(model)
    if sample is None and samples and callable(getattr(unwrapped(model), "generate", None)):
        sample = generated(model)
    drawn = None
    with replay(model):
        torch.manual_seed(0)  # every rank draws the same tokens
        model.eval()
        if sample is not None and samples:
            prompts = _batch([(len(long) - len(short), short), (0, long)], pad, device)
            ids, drawn = _attempt(model, "its sampler", hint, sample, *prompts, _NEW)
            short, long = (one + row for one, row in zip((short, long), ids.tolist(), strict=True))
        left = len(long) - len(short)
        padded = _batch([(left, short), (0, short), (0, long)], pad, device)
        together = _columns(_attempt(model, "a padded forward", hint, score, *padded))
        alone = _columns(_attempt(model, "a forward", hint, score, *_batch([(0, short)], pad, device)))
    precision = dtype or _precision(model, device)
    rounding = _ROUNDING.get(precision, _ROUNDING[torch.bfloat16])
    differences: dict[str, Difference] = {}
    for name, column in together.items():
        right = alone[name][0, 1:]
        for side, row in (("left", column[0, left:]), ("right", column[1, : len(short)])):
            differences[f"{name}, padded {side}"] = _difference(row[1:], right, rounding)
    if drawn is not None:
        whole = torch.cat([alone[LOGPROBS][0, -_NEW:], together[LOGPROBS][2, -_NEW:]])
        differences[f"{LOGPROBS}, sampled"] = _difference(drawn.flatten(), whole, rounding)
    found = ModelCheck(differences, precision)
    if found.failed:
        raise CapabilityError(_message(model, found, hint))
    if packing:
        check_packing(model, size)
    return found


def generated(model: Any, temperature: float = 1.0, **options: Any) -> Sample:
    """A sampler for `check_model`: the model's own ``generate``, and its untouched logits.

    Args:
        model: Has a ``generate``.
        temperature: Divides the logits.
        **options: Of ``generate``.
    """

    def sample(ids: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        new: Tensor = found.sequences[:, ids.shape[1] :]
        logprobs = (torch.stack(found.logits, 1).float() / temperature).log_softmax(-1)
        return new, logprobs.gather(-1, new.unsqueeze(-1)).squeeze(-1)

    return sample


def _scored(model: nn.Module) -> Score:
    known = forward_keywords(model)

    def score(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        more: dict[str, Any] = (
            {"position_ids": position_ids(attention_mask)} if "position_ids" in known else {}
        )
        logits = model(input_ids=input_ids, attention_mask=attention_mask, **more).logits
        return sequence_logprobs(logits, input_ids)[0]

    return score


def _attempt(model: nn.Module, what: str, hint: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a part of the model; a failure of its own is one of the test."""
    try:
        return function(*arguments)
    except (RLObjectivesError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an architecture raises that does not fit
        raise CapabilityError(
            f"{class_name(model)} fails the self-test before training: {what} of two short sequences "
            f"stopped with {type(error).__name__}: {error}\n  The model, or its version of transformers, does not do "
            f"what training needs. {hint}".rstrip()
        ) from error


def _columns(found: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {LOGPROBS: found} if isinstance(found, Tensor) else found


def _difference(found: Tensor, expected: Tensor, rounding: float) -> Difference:
    apart = (found.double() - expected.double()).abs()
    scale = max(1.0, float(expected.double().abs().max()))
    return Difference(float(apart.mean()), float(apart.max()), rounding * scale)


def _config(model: nn.Module) -> Any:
    """The configuration of the language model, however deep inside it is; that of its text, if it reads images too."""
    config = _whole_config(model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _whole_config(model: nn.Module) -> Any:
    found = (getattr(part, "config", None) for part in model.modules())
    known = (one for one in found if hasattr(one, "get_text_config") or hasattr(one, "vocab_size"))
    return next(known, None)


def _prompts(model: nn.Module, vocabulary: int, avoid: set[int]) -> tuple[list[int], list[int]]:
    """Two sequences of ordinary tokens, spread over the vocabulary, that fit into the model's positions."""
    for config in (_config(model), _whole_config(model)):
        for name, value in vars(config).items() if config is not None else ():
            if "token_id" in name or "token_index" in name:
                ids = value if isinstance(value, list) else [value]
                avoid |= {one for one in ids if isinstance(one, int)}
    ordinary = [one for one in range(vocabulary) if one not in avoid] or list(range(vocabulary))
    step = max(1, len(ordinary) // (_SHORT + _LONG + 1))
    tokens = [ordinary[(position + 1) * step % len(ordinary)] for position in range(_SHORT + _LONG)]
    limits = [getattr(_config(model), name, None) for name in _LIMITS]
    room = min((one - _NEW for one in limits if isinstance(one, int) and one > 0), default=_LONG)
    longest = min(_LONG, max(room, 2))
    return tokens[: min(_SHORT, max(2, longest // 2))], tokens[_SHORT : _SHORT + longest]


def _batch(rows: list[tuple[int, list[int]]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask of sequences, each behind its number of padding tokens, all as wide as the widest."""
    width = max(left + len(row) for left, row in rows)
    ids = [[pad] * left + row + [pad] * (width - left - len(row)) for left, row in rows]
    mask = [[0] * left + [1] * len(row) + [0] * (width - left - len(row)) for left, row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _precision(model: nn.Module, device: torch.device) -> torch.dtype:
    """The lowest precision that the model computes in, as far as weights and autocast tell."""
    kinds = {one.dtype for one in model.parameters()}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.float16)  # TF32 has as many digits
    known = [one if one in _ROUNDING else torch.bfloat16 for one in kinds]  # whole numbers: quantised
    return max(known, key=lambda one: (_ROUNDING[one], one == torch.float32))


def _message(model: nn.Module, found: ModelCheck, hint: str) -> str:
    lines = [
        f"  {name}: {one.mean:.2g} on average, {one.largest:.2g} at most; {'rounding' if one.fits else 'too much'} "
        f"(allowed on average: {one.allowed:.1g})"
        for name, one in found.differences.items()
    ]
    failed = {name.rsplit(" ", 1)[1] for name in found.failed}
    finite = all(math.isfinite(one.mean) for one in found.differences.values())
    cause, remedy = suspected_cause(model, failed, finite=finite)
    return "\n".join(
        [
            f"{class_name(model)} fails the self-test before training: the same tokens get other numbers "
            f"than in a forward of the sequence alone ({str(found.dtype).removeprefix('torch.')}).",
            *lines,
            f"  Suspected cause: {cause}",
            f"  {remedy} {hint}".rstrip(),
        ]
    )
