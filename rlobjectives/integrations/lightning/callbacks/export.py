"""The trained model as an ordinary folder that ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

__all__ = ["ExportModel"]


class ExportModel(Callback):
    """Saves model and tokenizer with ``save_pretrained`` when training ends, whatever shards the weights.

    Rank 0 holds the whole model for a moment.

    Args:
        folder: Where to write; by default ``model`` in the trainer's root folder.

    Example:
        >>> ExportModel().folder is None
        True
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the weights on all ranks and write them on the first."""
        module: Any = pl_module
        folder = Path(self.folder) if self.folder else Path(trainer.default_root_dir) / "model"
        with _whole_weights(trainer, module) as weights:
            if trainer.is_global_zero:
                module.model.save_pretrained(folder, state_dict=weights)
                module.tokenizer.save_pretrained(folder)
        trainer.strategy.barrier()


@contextlib.contextmanager
def _whole_weights(trainer: Trainer, module: Any) -> Any:
    """The model's whole state dictionary on rank 0, for as long as the block lasts."""
    if isinstance(trainer.strategy, ModelParallelStrategy):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        yield get_model_state_dict(module.model, options=options)
        return
    gathered: Any = contextlib.nullcontext()
    if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.strategy.zero_stage_3:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(module.model.parameters()), modifier_rank=None)
    with gathered:
        yield module.model.state_dict()
