"""Parameter groups that are frozen for single optimizer steps: the optimizer sees nothing of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlobjectives.errors import CapabilityError

__all__ = ["CRITIC_GROUP", "RestingGroups", "make_missing_state"]

CRITIC_GROUP = "critic"
"""First letters of the ``name`` of an optimizer's parameter group that trains the critic."""


class RestingGroups:
    """Lets every group but the critic's rest during chosen steps of an optimizer.

    A weight without a gradient is no business of a `torch.optim` optimizer: neither weights nor state change, and
    nothing decays. Gradients are taken away just before the step, on whatever the optimizer holds by then: ZeRO has
    replaced a group's parameters by flat shards, but not the groups, whose names say whose they are.

    Args:
        optimizer: What ``LightningModule.optimizers()`` gives.

    Raises:
        CapabilityError: Unless some of the groups, and not all, are named as the critic's.

    Example:
        >>> import torch
        >>> policy, critic = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> optimizer = torch.optim.SGD(
        ...     [{"params": [policy], "name": "policy"}, {"params": [critic], "name": "critic"}], lr=1.0)
        >>> resting = RestingGroups(optimizer)
        >>> policy.grad, critic.grad = torch.ones(1), torch.ones(1)
        >>> with resting.policy():
        ...     optimizer.step()
        >>> policy.item(), critic.item()
        (1.0, 0.0)
    """

    def __init__(self, optimizer: Any) -> None:
        innermost = optimizer
        while hasattr(innermost, "optimizer"):  # Lightning, then ZeRO, wrap the module's own
            innermost = innermost.optimizer
        names = [str(group.get("name", "")) for group in innermost.param_groups]
        critic = [name.startswith(CRITIC_GROUP) for name in names]
        if all(critic) or not any(critic):
            raise CapabilityError(
                f"The optimizer's parameter groups are named {names}; which are the critic's? Give each group a name, "
                f'{{"params": …, "name": "{CRITIC_GROUP}"}} for the critic\'s and another one for the policy\'s.'
            )
        self.optimizer: Optimizer = innermost
        self._on = False
        innermost.register_step_pre_hook(self._before_step)

    @contextlib.contextmanager
    def policy(self) -> Iterator[None]:
        """Steps inside leave everything but the critic's groups untouched."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._on:
            return
        for group in optimizer.param_groups:
            if not str(group.get("name", "")).startswith(CRITIC_GROUP):
                for parameter in group["params"]:
                    parameter.grad = None


def make_missing_state(optimizer: Optimizer) -> None:
    """Give each weight that has no optimizer state the one it would have before its first step: zeros.

    Optimizers make their state in a weight's first step. A step with a gradient and a learning rate of zero makes it
    and moves nothing; what it counted is set back.

    Args:
        optimizer: Adam, AdamW, RMSprop, SGD, or another one whose state begins as zeros; without any gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], weight_decay=0.1)
        >>> make_missing_state(optimizer)
        >>> optimizer.state[weight]["step"].item(), weight.tolist()
        (0.0, [1.0, 1.0])
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [one for one in every if one.requires_grad and one not in optimizer.state]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in missing:
        parameter.grad = None
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                value.zero_()
