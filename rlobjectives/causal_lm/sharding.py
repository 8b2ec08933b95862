"""Weights that are spread over ranks: spreading them block by block, and having them whole while sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

__all__ = ["is_sharded", "shard_blocks", "whole_weights"]

_SHARDING_MODULES = ("deepspeed.", "torch.distributed.fsdp.", "torch.distributed._composable.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


def shard_blocks(model: nn.Module, mesh: Any) -> None:
    """Shard a Hugging Face model with FSDP2, one transformer block at a time; does nothing the second time.

    Args:
        model: Names its blocks in ``_no_split_modules``.
        mesh: The data-parallel dimension of a device mesh.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(model, FSDPModule):
        return
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for part in list(model.modules()):
        if type(part).__name__ in blocks:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether some of the model's weights lie on several ranks (ZeRO-3, FSDP2)."""
    return _is_zero3(model) or bool(_fsdp_modules(model))


@contextlib.contextmanager
def whole_weights(model: _ModuleT) -> Iterator[_ModuleT]:
    """Give the model with all its weights at hand; every rank of the run must enter and leave.

    Sampling runs one forward per token. Under ZeRO-3 and FSDP2 each of them gathers every layer anew, and all ranks
    must run equally many. Here the weights are gathered once, and what is given is a view of the model that has
    them: the same parameters, in modules without the hooks that would gather and release them. Its forwards
    communicate with nobody. The weights of the whole model must fit on one device meanwhile.

    Args:
        model: Plain, or sharded with ZeRO-3 or FSDP2. A plain model is given as it is.

    Yields:
        A model for use without gradient, valid inside the ``with`` only.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with whole_weights(model) as whole, torch.no_grad():
        ...     whole(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    with contextlib.ExitStack() as stack:
        if _is_zero3(model):
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            stack.enter_context(GatheredParameters(list(model.parameters())))
        elif parts := _fsdp_modules(model):
            for part in parts:
                part.unshard()
                stack.callback(part.reshard)
        else:
            yield model
            return
        yield _without_sharding_hooks(model, {})


def _is_zero3(model: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _fsdp_modules(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def _without_sharding_hooks(module: _ModuleT, known: dict[int, nn.Module]) -> _ModuleT:
    """A shallow copy of a module tree; parameters, buffers and everything else are shared with the original."""
    twin = known.get(id(module))
    if twin is None:
        twin = known[id(module)] = object.__new__(type(module))
        twin.__dict__.update(vars(module))
        # ZeRO-3's own dictionary gathers what it is asked for.
        twin.__dict__["_parameters"] = dict(module._parameters)
        for name in _HOOKS:
            hooks = getattr(module, name)
            kept = {key: hook for key, hook in hooks.items() if not _shards(hook)}
            twin.__dict__[name] = type(hooks)(kept)
        twin.__dict__["_modules"] = {
            name: child if child is None else _without_sharding_hooks(child, known)
            for name, child in module._modules.items()
        }
    return twin  # type: ignore[return-value]  # known holds each module's own type


def _shards(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_SHARDING_MODULES)
