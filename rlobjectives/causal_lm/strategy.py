"""DeepSpeed on a machine without a GPU: Lightning's strategy with its CUDA-only steps replaced.

Lightning refuses DeepSpeed on anything but CUDA, though DeepSpeed itself shards, reduces and checkpoints on a
CPU. `DeepSpeedCPUStrategy` changes the four steps in which Lightning assumes CUDA and nothing else, so a run on
two CPU processes takes the very code path of a run on eight GPUs. On GPUs use Lightning's own
``deepspeed_stage_1/2/3``; `resolve_strategy` chooses between the two from the accelerator.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy, StrategyRegistry

from rlobjectives.causal_lm.op_build import load_shared_memory_op
from rlobjectives.integrations.extras import need

__all__ = ["DeepSpeedCPUStrategy", "load_shared_memory_op", "resolve_strategy"]


class DeepSpeedCPUStrategy(DeepSpeedStrategy):
    """Real DeepSpeed ZeRO on CPU processes (gloo), for tests, demos and machines without a GPU.

    All arguments are those of `lightning.pytorch.strategies.DeepSpeedStrategy`. Gradient clipping is always
    written into the DeepSpeed configuration: DeepSpeed clips at 1.0 when it is absent. Known to the `Trainer` as
    ``deepspeed_cpu_stage_1``, ``deepspeed_cpu_stage_2`` and ``deepspeed_cpu_stage_3``.

    The first run on a machine compiles DeepSpeed's shared-memory communication op (a C++ compiler and ninja; one
    to two minutes). Ranks build it one after the other, so no rank waits for a half-built one.

    Args:
        stage: ZeRO stage: 1 shards the optimizer state, 2 the gradients too, 3 the weights too.
        **kwargs: Further arguments of `DeepSpeedStrategy`.

    Raises:
        MissingExtraError: If DeepSpeed is not installed.
        MisconfigurationException: At set-up, if the trainer's accelerator is not a CPU.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=DeepSpeedCPUStrategy(stage=3), accelerator="cpu", devices=2, logger=False)
        >>> trainer.strategy.config["zero_optimization"]["stage"]
        3
    """

    strategy_name = "deepspeed_cpu"

    def __init__(self, stage: int = 3, **kwargs: Any) -> None:
        need("DeepSpeedCPUStrategy", "deepspeed")
        # DeepSpeed picks its device once, at import, by looking for GPU libraries.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(stage=stage, **kwargs)
        self._root_device_has_index = False

    @property
    def root_device(self) -> torch.device:
        """The CPU; with the local rank as its index while DeepSpeed reads that index, which it needs."""
        return torch.device("cpu", self.local_rank) if self._root_device_has_index else torch.device("cpu")

    @contextlib.contextmanager
    def _with_device_index(self) -> Iterator[None]:
        self._root_device_has_index = True
        try:
            yield
        finally:
            self._root_device_has_index = False

    def setup_environment(self) -> None:
        """Check for a CPU, where Lightning checks for CUDA."""
        if not isinstance(self.accelerator, CPUAccelerator):
            raise MisconfigurationException(
                f"DeepSpeedCPUStrategy needs accelerator='cpu'; the trainer has {type(self.accelerator).__name__}. "
                "On GPUs give strategy='deepspeed_stage_1', 'deepspeed_stage_2' or 'deepspeed_stage_3'."
            )
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Join the process group without asking for device indices, which CPUs do not have."""
        reset_seed()
        self.set_world_ranks()
        load_shared_memory_op()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_device_index():
            return super()._setup_model_and_optimizer(*args, **kwargs)

    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        with self._with_device_index():
            super()._initialize_deepspeed_inference(model)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add ``deepspeed_cpu_stage_1/2/3`` to Lightning's strategy names."""
        for stage in (1, 2, 3):
            description = f"DeepSpeed ZeRO stage {stage} on CPU processes"
            strategy_registry.register(f"{cls.strategy_name}_stage_{stage}", cls, description, stage=stage)


DeepSpeedCPUStrategy.register_strategies(StrategyRegistry)


def resolve_strategy(strategy: str | Strategy, accelerator: str) -> str | Strategy:
    """Name the strategy that can run `strategy` on this accelerator, so one YAML serves CPUs and GPUs.

    Args:
        strategy: A strategy name or object, as given to the `Trainer`.
        accelerator: The trainer's accelerator name; ``"auto"`` is a CPU where no GPU is visible.

    Returns:
        ``deepspeed_cpu_stage_N`` for Lightning's ``deepspeed_stage_N`` (or ``deepspeed``, which is stage 2) on a
        CPU; `strategy` unchanged in every other case.

    Raises:
        MissingExtraError: If it is one of DeepSpeed's and that is not installed.
        MisconfigurationException: If an offloading strategy is asked for on a CPU, where there is nothing to
            offload.

    Example:
        >>> resolve_strategy("deepspeed_stage_3", "cpu")
        'deepspeed_cpu_stage_3'
        >>> resolve_strategy("ddp", "cpu")
        'ddp'
    """
    if isinstance(strategy, str) and strategy.startswith("deepspeed"):
        need(f"strategy {strategy!r}", "deepspeed")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if not on_cpu or not isinstance(strategy, str) or not strategy.startswith("deepspeed"):
        return strategy
    names = {f"deepspeed_stage_{stage}": f"deepspeed_cpu_stage_{stage}" for stage in (1, 2, 3)}
    names["deepspeed"] = "deepspeed_cpu_stage_2"
    if strategy in names:
        return names[strategy]
    if "offload" not in strategy:
        return strategy  # a CPU strategy by its own name, or an unknown one that Lightning will refuse
    raise MisconfigurationException(
        f"strategy: {strategy} moves memory from a GPU to the host, and this run has no GPU. "
        f"Use one of {', '.join(names)}."
    )
