"""Which keywords a model's forward takes, behind wrappers that pass theirs on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["class_name", "forward_keywords", "position_ids", "unwrapped"]


def forward_keywords(model: nn.Module) -> frozenset[str]:
    """Names of the keywords that a model's forward takes.

    A wrapper whose forward takes any keyword (PEFT's, ``torch.compile``'s, `DistributedDataParallel`, one of your own
    with ``**kwargs``) passes it on to the model inside, whose names count too. One that names what it takes and
    nothing else hides the rest.

    Args:
        model: A language model, wrapped or not.

    Example:
        >>> class Inner(nn.Module):
        ...     def forward(self, input_ids, position_ids=None): ...
        >>> class Outer(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inside = Inner()
        ...     def forward(self, *args, **kwargs):
        ...         return self.inside(*args, **kwargs)
        >>> sorted(forward_keywords(Outer()))
        ['input_ids', 'position_ids']
    """
    found: set[str] = set()
    for part in _chain(model):
        found |= _signature(part)[0]
    return frozenset(found)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that pass every keyword on; the model itself where there is none.

    Args:
        model: A language model, wrapped or not.
    """
    return _chain(model)[-1]


def class_name(model: nn.Module) -> str:
    """What to call a model in a message: the class inside all wrappers, without what FSDP2 makes of its name.

    Args:
        model: A language model, wrapped or not.
    """
    kinds = type(unwrapped(model)).__mro__
    return next(kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed."))


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions counted from the first real token, as ``generate`` counts them: prompts are padded on the left.

    Args:
        attention_mask: ``[n, t]``, non-zero on real tokens.

    Returns:
        int64 ``[n, t]``; 0 on padding before the first token.

    Example:
        >>> import torch
        >>> position_ids(torch.tensor([[0, 0, 1, 1]])).tolist()
        [[0, 0, 0, 1]]
    """
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def _chain(model: nn.Module) -> list[nn.Module]:
    """The model and what it passes its keywords on to, outermost first."""
    chain = [model]
    while _passes_on(chain[-1]):
        inside = next((one for one in chain[-1].children() if "input_ids" in forward_keywords(one)), None)
        if inside is None:
            break
        chain.append(inside)
    return chain


def _passes_on(model: nn.Module) -> bool:
    names, any_keyword = _signature(model)
    # A Hugging Face model takes further keywords for its layers, not for another model.
    whole = hasattr(type(model), "base_model_prefix") and "input_ids" in names
    return any_keyword and not whole


def _signature(model: nn.Module) -> tuple[set[str], bool]:
    """Named parameters of a forward, and whether it takes any keyword besides."""
    forward: Callable[..., Any] = model.forward
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a forward that is not written in Python
        return set(), True
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named, any(one.kind is one.VAR_KEYWORD for one in parameters)
