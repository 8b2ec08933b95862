"""PolicySnapshots: sample with weights that are a known number of rollouts old."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rlobjectives.checks import check_positive_int
from rlobjectives.component import Metric
from rlobjectives.errors import CapabilityError, WindowError
from rlobjectives.statistics import Mean, Stat

__all__ = ["SNAPSHOT_METRICS", "PolicySnapshots", "local_weights"]

SNAPSHOT_METRICS: Mapping[str, Metric] = {
    "rollout/policy_age": Metric(Mean, "rollouts", "age of the weights that sampled"),
}


def local_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module as this rank stores them, by name; views, not copies.

    A sharded parameter gives its shard (FSDP2, and ZeRO-3 with what ZeRO keeps whole beside it), so that
    copying to or from these tensors needs no communication.

    Args:
        module: A module, before or after a strategy has sharded it. No parameter may be gathered at the
            moment.

    Example:
        >>> sorted(local_weights(nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    found: dict[str, Tensor] = {}
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        shard = getattr(value, "ds_tensor", None)
        if shard is not None:
            found[f"{name}/shard"] = shard.detach()
        whole = value.to_local() if hasattr(value, "to_local") else value
        if shard is None or whole.numel() > 0:
            found[name] = whole.detach()
    return found


class PolicySnapshots:
    """A ring buffer of policy weights, for controlled staleness of the policy that samples.

    A snapshot is taken before every ``interval``-th rollout, and each rollout is sampled with the *oldest*
    snapshot that is at most ``max_staleness`` rollouts old. With ``interval=1`` the age climbs to
    ``max_staleness`` and stays; with a longer interval it saws between ``max_staleness − interval + 1`` and
    ``max_staleness``.

    The state holds the snapshots themselves, so a resumed run samples with the very weights an uninterrupted
    one would. Under sharded strategies every rank holds its own shards. ZeRO-3 shards are saved and loaded as
    they are, so each rank must get its own state back; FSDP2 shards are saved as whole weights.

    Args:
        interval: Rollouts between two snapshots.
        max_staleness: Largest age of the weights that sample, in rollouts; 0 samples with the current ones.
        device: Where snapshots are kept.

    Raises:
        CapabilityError: If an option is out of range, or no snapshot could be young enough at times.

    Example:
        >>> policy, snapshots = nn.Linear(1, 1), PolicySnapshots(interval=1, max_staleness=2)
        >>> ages = []
        >>> for _ in range(4):
        ...     with snapshots.acting(policy):
        ...         ages.append(snapshots.age)
        >>> ages
        [0, 1, 2, 2]
    """

    def __init__(
        self, *, interval: int = 1, max_staleness: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        check_positive_int("interval", interval)
        if max_staleness != 0:
            check_positive_int("max_staleness", max_staleness)
        if interval > max_staleness + 1:
            raise CapabilityError(
                f"interval is {interval} and max_staleness {max_staleness}: before a new snapshot the last "
                f"one is {interval - 1} rollouts old. Raise max_staleness to at least {interval - 1}, or take "
                "snapshots more often."
            )
        self.interval = interval
        self.max_staleness = max_staleness
        self.device = torch.device(device)
        self.rollouts = 0
        self._snapshots: dict[int, dict[str, Tensor]] = {}
        self._age = 0

    @property
    def age(self) -> int:
        """Age in rollouts of the weights that sample, or last sampled."""
        return self._age

    def metrics(self) -> dict[str, Stat]:
        """``rollout/policy_age``, to report with the window's metrics."""
        return {"rollout/policy_age": Mean.of(torch.tensor([float(self._age)], dtype=torch.float64))}

    @contextmanager
    def acting(self, module: nn.Module) -> Iterator[None]:
        """Run one rollout: the module holds the behaviour policy's weights inside, its own again after.

        Args:
            module: The policy. Its weights must not be trained inside.
        """
        weights = local_weights(module)
        behavior = self._begin(weights)
        if behavior is None:
            yield
            return
        # A snapshot just taken is a copy of the current weights already.
        taken = self._snapshots.get(self.rollouts - 1)
        current = _copy(weights, self.device) if taken is None else taken
        _load(weights, behavior)
        try:
            yield
        finally:
            _load(local_weights(module), current)  # looked up again: sampling may have moved them

    def _begin(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        now = self.rollouts
        self.rollouts += 1
        if self.max_staleness and now % self.interval == 0:
            self._snapshots[now] = _copy(weights, self.device)
        self._snapshots = {
            born: one for born, one in self._snapshots.items() if now - born <= self.max_staleness
        }
        oldest = min(self._snapshots, default=now)
        self._age = now - oldest
        return self._snapshots[oldest] if self._age else None

    def state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """Everything a resumed run needs: the count of rollouts and the snapshots.

        Args:
            module: The policy, for sharded weights: FSDP2 shards become whole weights (every rank must call),
                and of ZeRO-3 shards the state notes whose they are.
        """
        return {
            "interval": self.interval,
            "max_staleness": self.max_staleness,
            "rollouts": self.rollouts,
            "age": self._age,
            "shard": _own_shard(module),
            "snapshots": {born: _whole(one, module) for born, one in self._snapshots.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module | None = None) -> None:
        """Continue from a state.

        Args:
            state: From `state_dict`.
            module: The policy, as it was given to `state_dict`.

        Raises:
            CapabilityError: If it was saved with another interval or staleness, or its shards belong elsewhere.
        """
        for name in ("interval", "max_staleness"):
            if state[name] != getattr(self, name):
                raise CapabilityError(
                    f"these snapshots were saved with {name} = {state[name]}; this run has "
                    f"{getattr(self, name)}. Resume with the same value: the behaviour policy depends on it."
                )
        if (own := _own_shard(module)) != (saved := state.get("shard")):
            raise CapabilityError(
                f"these snapshots hold {_shard_in_words(saved)}; this rank needs {_shard_in_words(own)}. Resume with the "
                "strategy and the number of ranks that saved them, from the checkpoint folder as it was written."
            )
        self.rollouts, self._age = state["rollouts"], state["age"]
        self._snapshots = {
            int(born): _copy(_parts(one, module), self.device) for born, one in state["snapshots"].items()
        }


def _copy(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: weight.detach().to(device, copy=True) for name, weight in weights.items()}


def _own_shard(module: nn.Module | None) -> list[int] | None:
    """Rank and number of ranks whose ZeRO-3 shards a module holds; None for whole weights."""
    if module is None or not any(hasattr(parameter, "ds_tensor") for parameter in module.parameters()):
        return None
    return [torch.distributed.get_rank(), torch.distributed.get_world_size()]


def _shard_in_words(shard: list[int] | None) -> str:
    return "whole weights" if shard is None else f"the ZeRO-3 shards of rank {shard[0]} of {shard[1]}"


def _distributed(module: nn.Module | None) -> dict[str, DTensor]:
    named = [] if module is None else module.named_parameters()
    return {name: value.data for name, value in named if isinstance(value.data, DTensor)}


def _whole(weights: Mapping[str, Tensor], module: nn.Module | None) -> dict[str, Tensor]:
    """Snapshots of FSDP2 shards as whole weights."""
    found = dict(weights)
    for name, like in _distributed(module).items():
        shard = weights[name].to(like.device)
        full = DTensor.from_local(
            shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        found[name] = full.full_tensor().to(weights[name].device)
    return found


def _parts(weights: Mapping[str, Tensor], module: nn.Module | None) -> dict[str, Tensor]:
    """The inverse of `_whole`: this rank's shards, cut without communication."""
    found = dict(weights)
    for name, like in _distributed(module).items():
        if name not in weights or weights[name].shape != like.shape:
            continue  # refused where it would be used, with the names of all that differ
        mesh, everywhere = like.device_mesh, [Replicate()] * like.device_mesh.ndim
        full = DTensor.from_local(weights[name].to(like.device), mesh, everywhere, run_check=False)
        found[name] = full.redistribute(mesh, like.placements).to_local()
    return found


@torch.no_grad()
def _load(weights: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    strange = sorted(weights.keys() ^ source.keys())
    strange += [name for name in weights if name in source and weights[name].shape != source[name].shape]
    if strange:
        raise WindowError(
            f"a snapshot and the policy do not have the same weights: {', '.join(strange[:5])} differ. Take "
            "snapshots after the strategy has set the module up, and resume with the same strategy and ranks."
        )
    for name, weight in weights.items():
        weight.copy_(source[name])
