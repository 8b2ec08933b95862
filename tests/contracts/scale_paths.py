"""On two ranks: by what factor does each training path shrink the sum of the ranks' losses?

Every path trains the same two-weight model with SGD on ragged micro-batches of two ranks. The update, compared with
the gradient of the plain sum over all ranks and micro-batches, gives the factor; a path that drops micro-batches
gives an update that is no multiple of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rlobjectives.causal_lm.strategy import DeepSpeedCPUStrategy

RANKS, MICRO_BATCHES = 2, 3
TOKENS = ((5, 1, 2), (3, 4, 1))  # of each micro-batch, by rank
PATTERNS = (
    "automatic",
    "engine_with_boundary",
    "engine_without_boundary",
    "module_with_boundary",
    "one_a_step",
)
GRADIENT = torch.tensor([[1.0, 2.0], [1.0, 7.0], [2.0, 3.0]])  # of a token's loss, by micro-batch


def loss_of(outputs: Tensor) -> Tensor:
    """The local sum of token losses: linear, so every path is exact."""
    return outputs.sum()


def tokens(rank: int, micro_batch: int) -> Tensor:
    """Inputs ``[tokens, 2]`` of one micro-batch."""
    return GRADIENT[micro_batch].repeat(TOKENS[rank][micro_batch], 1)


def reference(only: int | None = None) -> Tensor:
    """Gradient of the sum over all ranks and (all, or one) micro-batches."""
    kept = range(MICRO_BATCHES) if only is None else (only,)
    return torch.stack([tokens(rank, j).sum(0) for rank in range(RANKS) for j in kept]).sum(0)


class Toy(LightningModule):
    """A linear model without bias whose first weights are zero."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern
        self.automatic_optimization = pattern == "automatic"
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.final = torch.empty(0)

    def on_train_end(self) -> None:
        self.final = weights(self)  # before Lightning takes the engine down

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return loss_of(self(tokens(self.global_rank, batch_idx)))
        getattr(self, self.pattern)(batch_idx)
        return None

    # Every micro-batch in one training_step.

    def sync_on_last(self, batch_idx: int) -> None:
        model: Any = self.trainer.strategy.model
        for j in range(MICRO_BATCHES):
            last = j == MICRO_BATCHES - 1
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(loss_of(model(tokens(self.global_rank, j))))
        self.optimizers().step()

    def engine_with_boundary(self, batch_idx: int) -> None:
        self._window(self.trainer.strategy.model, boundary=True)

    def engine_without_boundary(self, batch_idx: int) -> None:
        self._window(self.trainer.strategy.model, boundary=False)

    def module_with_boundary(self, batch_idx: int) -> None:
        self._window(self, boundary=True)

    def _window(self, model: Callable[[Tensor], Tensor], *, boundary: bool) -> None:
        for j in range(MICRO_BATCHES):
            if boundary:
                self.trainer.strategy.model.set_gradient_accumulation_boundary(j == MICRO_BATCHES - 1)
            self.manual_backward(loss_of(model(tokens(self.global_rank, j))))
        self.optimizers().step()

    # One micro-batch a training_step.

    def one_a_step(self, batch_idx: int) -> None:
        last = batch_idx == MICRO_BATCHES - 1
        self.trainer.strategy.model.set_gradient_accumulation_boundary(last)
        self.manual_backward(loss_of(self(tokens(self.global_rank, batch_idx))))
        if last:
            self.optimizers().step()


def weights(module: Toy) -> Tensor:
    """The whole weight of a model that may be sharded."""
    parameter = module.layer.weight
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone().flatten()
    if hasattr(parameter, "full_tensor"):
        parameter = parameter.full_tensor()
    return parameter.detach().clone().flatten()


def deepspeed_strategy(stage: int) -> DeepSpeedCPUStrategy:
    """ZeRO that shards even two weights."""
    strategy = DeepSpeedCPUStrategy(stage=stage)
    if stage == 3:
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def train(pattern: str, strategy: Strategy) -> Tensor:
    """Train one window and return the update, at a learning rate of 1: what the optimizer took for the gradient."""
    module = Toy(pattern)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES if pattern == "automatic" else 1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = MICRO_BATCHES if pattern in ("automatic", "one_a_step") else 1
    trainer.fit(module, DataLoader(torch.zeros(batches, 1)))
    return -module.final


def torch_ddp() -> Tensor:
    """Plain `DistributedDataParallel` with `no_sync` until the last micro-batch."""
    import contextlib

    module = Toy("none")
    ddp = nn.parallel.DistributedDataParallel(module)
    for j in range(MICRO_BATCHES):
        with contextlib.nullcontext() if j == MICRO_BATCHES - 1 else ddp.no_sync():
            loss_of(ddp(tokens(torch.distributed.get_rank(), j))).backward()
    assert module.layer.weight.grad is not None
    return module.layer.weight.grad.flatten()


def deepspeed_engine(
    stage: int, accumulation: int, *, clipping: float | None = 0.0, **backward: Any
) -> Tensor:
    """A DeepSpeed engine without Lightning, its accumulation counted by itself."""
    import deepspeed

    module = Toy("none")
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            **({} if clipping is None else {"gradient_clipping": clipping}),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        },
        dist_init_required=False,
    )
    for j in range(MICRO_BATCHES):
        if accumulation == 1:
            engine.set_gradient_accumulation_boundary(j == MICRO_BATCHES - 1)
        engine.backward(loss_of(engine(tokens(engine.global_rank, j))), **backward)
        if accumulation > 1:
            engine.step()
    if accumulation == 1:
        engine.step()
    return -weights(module)


def measure(update: Tensor) -> dict[str, Any]:
    """Say which losses reached the update, and by what factor it falls short of their sum."""
    for kept, only in (("all", None), ("last only", MICRO_BATCHES - 1)):
        ratio = reference(only) / update
        if torch.allclose(ratio, ratio[0].expand(2), rtol=1e-5):
            return {"kept": kept, "factor": round(float(ratio[0]), 4)}
    return {"kept": "neither", "update": update.tolist()}


def measure_all() -> dict[str, Any]:
    """Measure every path, and what DeepSpeed clips at when nobody says."""
    found: dict[str, Any] = {}
    found["ddp automatic"] = measure(train("automatic", DDPStrategy()))
    found["ddp manual"] = measure(train("sync_on_last", DDPStrategy()))
    found["torch ddp"] = measure(torch_ddp())
    for pattern, name in (("automatic", "automatic"), ("sync_on_last", "manual")):
        strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
        found[f"fsdp2 {name}"] = measure(train(pattern, strategy))
    for stage in (1, 2, 3):
        name = f"zero-{stage}"
        found[f"{name} engine"] = measure(deepspeed_engine(stage, MICRO_BATCHES))
        found[f"{name} engine unscaled"] = measure(
            deepspeed_engine(stage, MICRO_BATCHES, scale_wrt_gas=False)
        )
        found[f"{name} engine boundary"] = measure(deepspeed_engine(stage, 1))
        for pattern in PATTERNS:
            found[f"{name} {pattern}"] = measure(train(pattern, deepspeed_strategy(stage)))
    found["default clipping"] = deepspeed_engine(1, 1, clipping=None).norm()
    return found
