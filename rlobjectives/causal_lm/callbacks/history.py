"""The course of a run: every metric of every step, as a file and as a picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlobjectives.causal_lm.callbacks.curves import draw_curves
from rlobjectives.integrations.lightning.files import check_folders
from rlobjectives.integrations.whole_files import replacing, write_text

__all__ = ["RunHistory"]


class RunHistory(Callback):
    """Keeps the metrics of every rollout and validation; writes ``history.json`` and ``curves.png`` at the end.

    Also at the end of a run that was interrupted or failed, with what there is by then. The validation that
    Lightning runs before training (``num_sanity_val_steps: -1``) is kept as step 0: the policy before training.

    Args:
        folder: Where to write; by default the trainer's root folder.

    Raises:
        CapabilityError: At set-up, if the folder cannot be written.

    Example:
        >>> RunHistory("runs/demo").folder
        'runs/demo'
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.training: list[dict[str, float]] = []
        self.validation: list[dict[str, float]] = []
        self._started = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a folder that cannot be written."""
        if stage == "fit":
            writes = trainer.is_global_zero
            check_folders("RunHistory", self.folders(trainer), writes=writes, module=pl_module, stage=stage)

    def folders(self, trainer: Trainer) -> list[Path]:
        """Where rank 0 will write."""
        return [self._folder(trainer)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        del trainer, pl_module
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep a rollout's metrics."""
        del pl_module, outputs, batch, batch_idx
        self.training.append(self._entry(trainer, validation=False))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a validation's metrics."""
        del pl_module
        self.validation.append(self._entry(trainer, validation=True))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write both files."""
        self._write(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what there is, so that a long run that fails still shows its course."""
        del exception
        if self.training:
            self._write(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The course so far, so that a resumed run draws whole curves."""
        return {"training": self.training, "validation": self.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue it."""
        self.training = list(state_dict["training"])
        self.validation = list(state_dict["validation"])

    def _entry(self, trainer: Trainer, *, validation: bool) -> dict[str, float]:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        kept = {name: value for name, value in metrics.items() if name.startswith("val/") == validation}
        return {"step": trainer.global_step, **kept}

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or trainer.default_root_dir)

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        folder = self._folder(trainer)
        objective = getattr(module, "objective", None)
        history = {
            "objective": getattr(objective, "name", None),
            "strategy": describe_strategy(trainer),
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "seconds": time.perf_counter() - self._started,
            "training": self.training,
            "validation": self.validation,
        }
        write_text(folder / "history.json", json.dumps(history))
        if self.training:
            title = f"{history['objective'] or type(module).__name__} · {history['strategy']}"
            with replacing(folder / "curves.png", keep_suffix=True) as path:
                draw_curves(self.training, self.validation, path, title=title)


def describe_strategy(trainer: Trainer) -> str:
    """The strategy's name, with the ZeRO stage that really runs."""
    strategy: Any = trainer.strategy
    config = getattr(strategy, "config", None)
    if isinstance(config, dict) and "zero_optimization" in config:
        return f"deepspeed_stage_{config['zero_optimization']['stage']}"
    names = {"SingleDeviceStrategy": "single_device", "DDPStrategy": "ddp", "ModelParallelStrategy": "fsdp2"}
    return names.get(type(strategy).__name__, type(strategy).__name__)
