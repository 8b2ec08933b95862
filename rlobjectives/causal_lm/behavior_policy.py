"""The policy that samples, where it is on purpose not the one being trained: weights of some rollouts ago."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.engine import Engine
from rlobjectives.integrations.snapshots import PolicySnapshots
from rlobjectives.statistics import Stat

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.resuming import ResumableRollouts

    _Base = ResumableRollouts
else:
    _Base = object

__all__ = ["StaleSampling", "check_strategy"]

_CHECKPOINT_KEY = "rlobjectives_snapshots"


class StaleSampling(_Base):
    """Adds `PolicySnapshots` to a module with a ``model``: through set-up, rollouts and checkpoints.

    Sample inside ``behavior_weights()``; everything else sees the current weights. A checkpoint holds the
    snapshots, so a resumed run is sampled by the very policy an uninterrupted one would be. Under ZeRO-3 each
    rank keeps and saves its own shards, and the run must resume on as many ranks; under FSDP2 a checkpoint holds
    whole weights.
    """

    model: Any
    snapshots: PolicySnapshots | None = None
    _sampling_for: int | None = None

    if TYPE_CHECKING:

        def _ready(self) -> Engine: ...

    def setup(self, stage: str) -> None:
        """Refuse weights that snapshots cannot read.

        Raises:
            CapabilityError: If the strategy keeps weights where they cannot be copied exactly.
        """
        super().setup(stage)
        if self.snapshots is not None:
            check_strategy(self.trainer.strategy)

    @contextmanager
    def behavior_weights(self) -> Iterator[None]:
        """The model holds the sampling policy's weights inside, its own again after."""
        if self.snapshots is None:
            yield
            return
        engine = self._ready()
        engine.settle()  # what the strategy has gathered would be neither copied nor replaced
        self._sampling_for = self.rollouts_made
        with self.snapshots.acting(self.model):
            try:
                yield
            finally:
                engine.settle()

    def behavior_metrics(self) -> dict[str, Stat]:
        """``rollout/policy_age`` of the last rollout; nothing without snapshots."""
        return {} if self.snapshots is None else self.snapshots.metrics()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the snapshots."""
        super().on_save_checkpoint(checkpoint)
        if self.snapshots is not None:
            self._ready().settle()
            state = self.snapshots.state_dict(self.model)
            if self._sampling_for == self.rollouts_made:  # interrupted before it was made: it comes again
                state["rollouts"] -= 1
            checkpoint[_CHECKPOINT_KEY] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the snapshots of the interrupted run.

        Raises:
            CapabilityError: If the interrupted run was sampled in another way, or on other ranks.
        """
        super().on_load_checkpoint(checkpoint)
        saved: Mapping[str, Any] | None = checkpoint.get(_CHECKPOINT_KEY)
        if self.snapshots is None or saved is None:
            if saved is not None and saved["snapshots"]:
                raise CapabilityError(
                    f"the checkpoint was sampled with snapshots (interval = {saved['interval']}, max_staleness = "
                    f"{saved['max_staleness']}), and this run has none. Give the same, or start from the weights alone."
                )
            return
        self.snapshots.load_state_dict(saved, self.model)


def check_strategy(strategy: Any) -> None:
    """Refuse a strategy whose weights cannot be exchanged in place, exactly.

    Args:
        strategy: Of a Lightning trainer.

    Raises:
        CapabilityError: Naming the setting of DeepSpeed that is in the way.

    Example:
        >>> from rlobjectives.causal_lm import DeepSpeedCPUStrategy
        >>> strategy = DeepSpeedCPUStrategy(stage=3)
        >>> check_strategy(strategy)
        >>> strategy.config["zero_optimization"]["zero_quantized_weights"] = True
        >>> check_strategy(strategy)
        Traceback (most recent call last):
        ...
        rlobjectives.errors.CapabilityError: snapshots cannot be kept with zero_quantized_weights in the DeepSpeed
        configuration: the shards are not the weights themselves. Leave it out, or sample without snapshots.
    """
    if not isinstance(strategy, DeepSpeedStrategy) or not isinstance(strategy.config, dict):
        return
    zero = strategy.config.get("zero_optimization", {})
    offload = zero.get("offload_param") or {}
    found = {
        "zero_quantized_weights": zero.get("zero_quantized_weights")
        and "the shards are not the weights themselves",
        "zero_hpz_partition_size": int(zero.get("zero_hpz_partition_size", 1)) > 1
        and "a second copy of the shards would keep the other weights",
        "offload_param to nvme": offload.get("device") == "nvme" and "the shards are in files",
    }
    for setting, reason in found.items():
        if reason:
            raise CapabilityError(
                f"snapshots cannot be kept with {setting} in the DeepSpeed configuration: {reason}. Leave it out, or "
                "sample without snapshots."
            )
