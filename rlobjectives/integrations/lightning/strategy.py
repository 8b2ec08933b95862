"""DeepSpeed on a machine without a GPU: Lightning's strategy with its CUDA-only steps replaced.

Lightning refuses DeepSpeed on anything but CUDA, though DeepSpeed itself shards, reduces and checkpoints on a
CPU. `DeepSpeedCPUStrategy` changes the four steps in which Lightning assumes CUDA and nothing else, so a run on
two CPU processes takes the very code path of a run on eight GPUs. On GPUs use Lightning's own
``deepspeed_stage_1/2/3``; `resolve_strategy` chooses between the two from the accelerator.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy, StrategyRegistry

__all__ = ["DeepSpeedCPUStrategy", "load_shared_memory_op", "resolve_strategy"]

_LONGEST_BUILD_SECONDS = 900.0


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
        MisconfigurationException: At set-up, if the trainer's accelerator is not a CPU.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=DeepSpeedCPUStrategy(stage=3), accelerator="cpu", devices=2, logger=False)
        >>> trainer.strategy.config["zero_optimization"]["stage"]
        3
    """

    strategy_name = "deepspeed_cpu"

    def __init__(self, stage: int = 3, **kwargs: Any) -> None:
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
        MisconfigurationException: If an offloading strategy is asked for on a CPU, where there is nothing to
            offload.

    Example:
        >>> resolve_strategy("deepspeed_stage_3", "cpu")
        'deepspeed_cpu_stage_3'
        >>> resolve_strategy("ddp", "cpu")
        'ddp'
    """
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


def _open_lock(path: Path) -> IO[str]:
    """Open a lock in a folder that is everybody's: a link that somebody else has put there is not followed."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w")
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be opened ({error.strerror}): somebody else has put a file or a link there. Delete it."
        ) from error


def load_shared_memory_op() -> None:
    """Build, or load, DeepSpeed's shared-memory op while no other process does.

    DeepSpeed builds it on first use on a CPU. Two processes that build at once, or a build that was killed, leave
    a lock file on which every later process waits for ever. A lock of the operating system, which is released
    when its holder dies, lets one process build and the others load.

    Raises:
        RuntimeError: If a dead build's lock file is in the way; the message names the file to delete.
    """
    import fcntl  # absent on Windows, where DeepSpeed has no CPU backend either

    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        return
    lock_path = Path(tempfile.gettempdir()) / f"rlobjectives-deepspeed-op-{os.getuid()}.lock"
    with _open_lock(lock_path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not builder.is_compatible(verbose=False):  # DeepSpeed then runs without the op
            return
        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        for stale in root.glob(f"**/{builder.NAME}/lock"):
            if time.time() - stale.stat().st_mtime > _LONGEST_BUILD_SECONDS:
                raise RuntimeError(
                    f"{stale} was left by a build of DeepSpeed's {builder.NAME} that died, and torch would wait "
                    "on it for ever. Delete that file and run again."
                )
        builder.load(verbose=False)
