"""Forward, backward and step of a Lightning module, as each of Lightning's strategies needs them.

Two facts decide everything here. The gradient of the *wrapped* model is averaged over the data-parallel ranks,
whatever the strategy, as long as the module optimizes manually and no accumulation divisor is set; so one factor
serves all. And a strategy notices a micro-batch only through the wrapped model's forward: under ZeRO-3 a call to
the bare module silently drops every gradient but the last.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlobjectives.distributed import Communicator
from rlobjectives.distributed.faults import told
from rlobjectives.errors import CapabilityError, NonFiniteError
from rlobjectives.integrations.lightning.freezing import make_missing_state

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer

__all__ = ["Engine", "gradient_norm", "make_engine"]


class Engine(abc.ABC):
    """What one strategy needs for a forward, a backward and a step.

    Args:
        module: A module attached to a trainer whose strategy has been set up.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.strategy: Any = module.trainer.strategy

    @property
    def data_ranks(self) -> int:
        """Ranks that hold different data."""
        return int(self.strategy.world_size)

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return int(self.strategy.global_rank)

    def communicator(self) -> Communicator:
        """How they exchange statistics: by default over all ranks of the run."""
        return Communicator.world() if self.data_ranks > 1 else Communicator()

    def forward(self, *inputs: Any) -> Any:
        """Run the module's forward through the strategy's wrapper."""
        return self.strategy.model(*inputs)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Surround the forward and backward of one micro-batch of a window.

        Args:
            last: Whether it is the window's last, after which gradients must be reduced over the ranks.
        """
        del last
        yield

    def settle(self) -> None:  # noqa: B027  # most strategies have nothing to settle
        """Finish what the wrapper has begun in advance, so that weights may be gathered by other means."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss."""
        self.module.manual_backward(loss)

    def attach(self, loss: Tensor, absent: Iterable[nn.Parameter]) -> Tensor:
        """Let weights that a forward left out take part in its backward, where the strategy insists on it.

        Args:
            loss: The loss of that forward.
            absent: Trainable weights that it did not use; the same on all ranks.

        Returns:
            The same number.
        """
        del absent
        return loss

    def discard(self, absent: Iterable[nn.Parameter]) -> None:
        """Forget gradients of weights that are not to be stepped, so that neither norm nor optimizer sees them."""
        for parameter in absent:
            parameter.grad = None

    def complete_state(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # most need no state early
        """Make the optimizer state that weights which rest do not have yet, where checkpoints insist on it.

        Args:
            optimizer: The module's own optimizer, before the first backward.
        """

    def step(self, optimizer: LightningOptimizer, clip: float | None) -> Tensor:
        """Clip, update the weights and clear the gradients.

        Args:
            optimizer: The module's optimizer.
            clip: Largest allowed norm of the whole gradient; None leaves it alone.

        Returns:
            The norm of the whole gradient before clipping, 0-d, the same on all ranks.

        Raises:
            NonFiniteError: If the norm is not finite; the weights are unchanged.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = gradient_norm(p.grad for p in parameters if p.grad is not None)
        _check_norm(norm, "The weights were not changed.")
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        self._begin_step()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def _begin_step(self) -> None:
        """From here on, until the step is counted, a checkpoint would hold weights of which only some have moved."""
        unfinished = getattr(self.module, "unfinished", None)
        if unfinished is not None:
            unfinished.inside_step = True


class SingleEngine(Engine):
    """One process."""


class DDPEngine(Engine):
    """`DistributedDataParallel`: gradients are reduced in the backward of the last micro-batch."""

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Hold reduction back until the last micro-batch."""
        with contextlib.nullcontext() if last else self.strategy.block_backward_sync():
            yield

    def attach(self, loss: Tensor, absent: Iterable[nn.Parameter]) -> Tensor:
        """Give every absent weight a gradient of zero: the reducer waits until each one has had its turn."""
        for parameter in absent:
            loss = loss + parameter.flatten()[:0].sum().to(
                loss.dtype
            )  # the sum of nothing, and not 0 × weight
        return loss


class FSDP2Engine(Engine):
    """`fully_shard` under `ModelParallelStrategy`: reduce-scatter in the backward of the last micro-batch."""

    @property
    def _mesh(self) -> Any:
        return self.strategy.device_mesh["data_parallel"]

    @property
    def data_ranks(self) -> int:
        """Size of the mesh's data-parallel dimension; tensor-parallel ranks share their data."""
        return int(self._mesh.size())

    @property
    def data_rank(self) -> int:
        """Place in the mesh's data-parallel dimension."""
        return int(self._mesh.get_local_rank())

    def communicator(self) -> Communicator:
        """Over the mesh's data-parallel dimension."""
        return Communicator(self._mesh.get_group())

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Accumulate unsharded gradients until the last micro-batch, as Lightning does not do by itself."""
        from torch.distributed.fsdp import FSDPModule

        for part in self.strategy.model.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(last, recurse=False)
        yield

    def complete_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make zeros for every weight without state: a distributed checkpoint is loaded for all weights or none."""
        make_missing_state(optimizer)

    def settle(self) -> None:
        """Release what a forward without a backward leaves gathered: the outermost block's weights."""
        from torch.distributed.fsdp import FSDPModule

        for part in self.strategy.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


class DeepSpeedEngine(Engine):
    """DeepSpeed ZeRO: the engine clips, steps, clears gradients and must be told where a window ends."""

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Set the accumulation boundary before the forward, where ZeRO reads it."""
        self.strategy.model.set_gradient_accumulation_boundary(last)
        yield

    def settle(self) -> None:
        """Under ZeRO-3, wait for weights that are being fetched in advance and release them.

        Lightning runs the whole ``training_step`` inside a forward of the engine, which starts to fetch the weights
        it saw used the last time. Where the step then uses them in another order, or not at all (an empty window),
        they stay in flight, and gathering them for generation or a checkpoint fails.
        """
        engine = self.strategy.model
        if engine.zero_optimization_stage() == 3:
            engine.optimizer.empty_partition_cache()

    def discard(self, absent: Iterable[nn.Parameter]) -> None:
        """Nothing: the engine keeps gradients in buffers of its own, zero for weights that no backward reached."""

    def step(self, optimizer: LightningOptimizer, clip: float | None) -> Tensor:
        """Step through the engine, whose configuration carries the clipping value (see `configure`)."""
        engine = self.strategy.model
        if float(engine.gradient_clipping()) != float(clip or 0.0):
            raise CapabilityError(
                f"DeepSpeed clips gradients at {engine.gradient_clipping()}, but gradient_clip_val is {clip}. "
                "Leave gradient_clipping out of the DeepSpeed configuration; it is written from gradient_clip_val."
            )
        self._begin_step()
        optimizer.step()
        norm = torch.as_tensor(engine.get_global_grad_norm())
        if engine.zero_optimization_stage() == 3:
            # ZeRO-3 overwrites this buffer where a gradient arrives and keeps the rest, so the next window would see
            # the last gradient of every weight that it does not use itself.
            engine.optimizer.grad_partitions_flat_buffer.zero_()
        _check_norm(norm, "DeepSpeed has already applied the step: go back to the last checkpoint.")
        return norm


def configure(trainer: Trainer, clip: float | None) -> None:
    """Write the clipping value where DeepSpeed reads it, before the engine is built.

    DeepSpeed clips at 1.0 when its configuration does not say (0.19), so ``None`` is written as 0, which is off.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy) and isinstance(strategy.config, dict):
        strategy.config.setdefault("gradient_clipping", float(clip or 0.0))


def make_engine(module: LightningModule) -> Engine:
    """Choose the engine for the trainer's strategy.

    Raises:
        CapabilityError: If the strategy is not one of those this library has measured.
    """
    return engine_type(module.trainer)(module)


def engine_type(trainer: Trainer) -> type[Engine]:
    """The engine class for a trainer's strategy, known before anything is set up.

    Raises:
        CapabilityError: If the strategy is not one of those this library has measured.
    """
    kinds: tuple[tuple[type, type[Engine]], ...] = (
        (DeepSpeedStrategy, DeepSpeedEngine),  # a DDPStrategy too, so it comes first
        (DDPStrategy, DDPEngine),
        (ModelParallelStrategy, FSDP2Engine),
        (SingleDeviceStrategy, SingleEngine),
    )
    for strategy, engine in kinds:
        if isinstance(trainer.strategy, strategy):
            return engine
    raise CapabilityError(
        f"ObjectiveMixin does not know how {type(trainer.strategy).__name__} scales gradients. Use a single device, "
        "ddp, deepspeed_stage_1, deepspeed_stage_2, deepspeed_stage_3, or ModelParallelStrategy (FSDP2)."
    )


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of a whole gradient, also when parts of it are sharded over several device meshes.

    Args:
        gradients: Plain tensors or `DTensor` shards.

    Returns:
        0-d, equal on all ranks if the gradients were reduced; 0 without any gradient.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(
            gradient
        )
    norms = []
    for part in by_mesh.values():
        norm = nn.utils.get_total_norm(part)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return nn.utils.get_total_norm(norms)


def _check_norm(norm: Tensor, outcome: str) -> None:
    value = float(norm)
    if not math.isfinite(value):
        raise told(
            NonFiniteError(
                f"The gradient has norm {value}, on all ranks alike. {outcome} Usual causes: a learning rate that is too "
                "high, or half precision where the model needs float32."
            )
        )
