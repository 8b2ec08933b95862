"""Sampling completions from a causal language model, with the log-probability of every sampled token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlobjectives.checks import check_number, check_positive_int, refuse_rows
from rlobjectives.distributed import LOCAL, Communicator
from rlobjectives.errors import CapabilityError, NonFiniteError
from rlobjectives.integrations.transformers.keywords import (
    class_name,
    forward_keywords,
    position_ids,
    unwrapped,
)

__all__ = ["Completions", "SamplingOptions", "sample_completions", "sampling_logprobs"]

# Ranks agree on "all done" this often; between two agreements nobody looks at the device.
_STEPS_BETWEEN_CHECKS = 8


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn.

    Args:
        max_new_tokens: Longest completion, its end-of-sequence token included.
        temperature: Divides the logits; 1 samples the model itself.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keep this many most probable tokens; 0 keeps all.

    Raises:
        CapabilityError: If a number is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        check_positive_int("max_new_tokens", self.max_new_tokens)
        check_number("temperature", self.temperature, low=0.0, open_low=True)
        check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        if self.top_k != 0:
            check_positive_int("top_k (0 keeps all)", self.top_k)

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Completions:
    """What was sampled; all columns ``[n, c]`` with c the longest completion.

    Attributes:
        ids: Token ids; the padding id after the end.
        mask: True on sampled tokens, the end-of-sequence token included.
        logprobs: Log-probability of each token under the distribution it was drawn from (temperature
            applied, truncated and renormalised), in nats; 0 after the end. 0 throughout if greedy.
    """

    ids: Tensor
    mask: Tensor
    logprobs: Tensor


def sampling_logprobs(
    logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Log-probabilities of the distribution that is really sampled from.

    Args:
        logits: ``[n, v]``.
        temperature: Divides the logits.
        top_p: Tokens are kept, most probable first, while the mass before them is below this.
        top_k: Tokens kept, before `top_p` is applied; 0 keeps all.

    Returns:
        Float32 ``[n, v]`` in nats, renormalised over the kept tokens, −inf elsewhere.

    Example:
        >>> probabilities = torch.tensor([[0.5, 0.3, 0.2]])
        >>> sampling_logprobs(probabilities.log(), top_p=0.6).exp()
        tensor([[0.6250, 0.3750, 0.0000]])
    """
    z = logits.float() / temperature
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, dim=-1).values[:, -1:], -math.inf)
    logprobs = z.log_softmax(-1)
    if top_p < 1.0:
        ordered, order = logprobs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # mass of the more probable tokens
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logprobs = logprobs.masked_fill(cut, -math.inf).log_softmax(-1)
    return logprobs


@torch.no_grad()
def sample_completions(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    options: SamplingOptions,
    *,
    eos_ids: Tensor,
    pad_id: int,
    greedy: bool = False,
    communicator: Communicator = LOCAL,
) -> Completions:
    """Complete left-padded prompts, one token at a time, with a key-value cache.

    Draws from torch's global generator. Where the model's layers communicate (sharded weights), every rank
    must run the same number of forwards: give the ranks as `communicator`, and they agree on when to stop.

    Args:
        model: A Hugging Face causal language model. Its training mode is restored afterwards.
        input_ids: Prompts ``[n, p]``, padded on the left.
        attention_mask: ``[n, p]``, 1 on real tokens.
        options: How to draw.
        eos_ids: Ids that end a completion, ``[k]``.
        pad_id: Fills completions that ended.
        greedy: Take the most probable token instead of drawing.
        communicator: Ranks that run the forwards together; a single process by default.

    Returns:
        Ids, mask and log-probabilities of the completions.

    Raises:
        NonFiniteError: If the model's logits were NaN or infinite for a completion that had not ended. Noted on the
            device and read once, after the last token.
    """
    keys = _Keywords(model)
    training = model.training
    model.eval()
    attention = attention_mask.to(torch.long)
    position = position_ids(attention)
    done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    broken = torch.zeros_like(done)
    step_ids, cache = input_ids, None
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(options.max_new_tokens):
        output = model(**keys.arguments(step_ids, attention, position, cache))
        if step == 0 and keys.cache_of(output) is None:
            cache = keys.empty_cache()  # one that is filled in place and never given back
            output = model(**keys.arguments(step_ids, attention, position, cache))
        returned = keys.cache_of(output)
        cache = cache if returned is None else returned
        ids, logprobs, bad = _draw(output.logits[:, -1], options, greedy)
        broken = broken | (bad & ~done)
        ids = torch.where(done, pad_id, ids)
        columns.append((ids, ~done, torch.where(done, 0.0, logprobs)))
        done = done | torch.isin(ids, eos_ids) | broken
        if (step + 1) % _STEPS_BETWEEN_CHECKS == 0 and _all_done(done, communicator):
            break
        step_ids = ids.unsqueeze(1)
        attention = torch.cat([attention, attention.new_ones(len(ids), 1)], 1)
        position = position[:, -1:] + 1
    model.train(training)
    refuse_rows(
        broken,
        "have no next token to draw: the model's logits are NaN or infinite",
        "The weights have probably diverged: lower learning_rate, set gradient_clip_val, and look at optim/grad_norm "
        "of the last steps. With a temperature near 0, raise it.",
        NonFiniteError,
    )
    ids, mask, logprobs = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    longest = max(1, int(mask.sum(1).max())) if len(ids) else 1
    return Completions(ids[:, :longest], mask[:, :longest], logprobs[:, :longest])


def _draw(logits: Tensor, options: SamplingOptions, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, their log-probabilities, and which rows have no finite distribution."""
    if greedy:
        best, ids = logits.max(-1)
        return ids, torch.zeros(ids.shape, device=ids.device), ~best.isfinite()
    logprobs = sampling_logprobs(
        logits, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k
    )
    # A softmax over a NaN, over +∞ or over nothing but −∞ is NaN in every place. Such a row draws from something, and
    # is refused at the end: multinomial itself would look at the device for every token, or bring down its context.
    bad = logprobs[:, 0].isnan()
    chosen = torch.multinomial(logprobs.exp().nan_to_num_(nan=1.0), 1)
    return chosen.squeeze(1), logprobs.gather(1, chosen).squeeze(1), bad


def _all_done(done: Tensor, communicator: Communicator) -> bool:
    return bool(communicator.gather(done.all().float().reshape(1)).all())


class _Keywords:
    """The keyword arguments of a model's forward, which differ between architectures and releases."""

    def __init__(self, model: nn.Module) -> None:
        known = forward_keywords(model)
        self._inside = inside = unwrapped(model)
        self._name = class_name(model)
        self._positions = "position_ids" in known
        self._last_only = "logits_to_keep" in known
        self._use_cache = "use_cache" in known
        # A model without attention reads the mask of the tokens that it is given, not of those in its state.
        self._own_mask = bool(getattr(inside, "_is_stateful", False)) and not self._positions
        self._cache = next((name for name in ("cache", "past_key_values") if name in known), None)
        if self._cache is None:
            raise CapabilityError(
                f"{self._name} takes no key-value cache (neither cache nor past_key_values), which "
                "the sampler needs. Override complete() with a sampler for this architecture."
            )

    def arguments(self, ids: Tensor, attention: Tensor, position: Tensor, cache: Any) -> dict[str, Any]:
        if cache is not None and self._own_mask:
            attention = attention[:, -ids.shape[1] :]
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": attention}
        if self._use_cache:
            found["use_cache"] = True
        if self._positions:
            found["position_ids"] = position
        if self._last_only:
            found["logits_to_keep"] = 1
        if cache is not None and self._cache is not None:
            found[self._cache] = cache
        return found

    @staticmethod
    def cache_of(output: Any) -> Any:
        cache = getattr(output, "cache", None)
        return getattr(output, "past_key_values", None) if cache is None else cache

    def empty_cache(self) -> Any:
        from transformers import DynamicCache

        config: Any = getattr(self._inside, "config", None)
        if config is None:
            raise CapabilityError(
                f"{self._name} gives back no cache (neither cache nor past_key_values), so the sampler cannot go on "
                "from the tokens before. Override complete() with a sampler for this architecture."
            )
        return DynamicCache(config=config)
