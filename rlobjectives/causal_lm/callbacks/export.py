"""The trained model as an ordinary folder that ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import nn

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.files import check_folders

__all__ = ["ExportModel"]


class ExportModel(Callback):
    """Saves model and tokenizer with ``save_pretrained`` when training ends, whatever shards the weights.

    Rank 0 holds the whole model for a moment.

    Args:
        folder: Where to write; by default ``model`` in the trainer's root folder.
        critic_folder: Where to write the critic, for `CausalLMWithValue.from_pretrained`; None does not save it.

    Raises:
        CapabilityError: At set-up, if there is a folder for a critic and no critic, or a folder cannot be written.

    Example:
        >>> ExportModel().folder is None
        True
    """

    def __init__(self, folder: str | None = None, critic_folder: str | None = None) -> None:
        self.folder = folder
        self.critic_folder = critic_folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a critic's folder where there is no critic, and a folder that cannot be written."""
        if self.critic_folder is not None and not hasattr(pl_module, "critic_model"):
            raise CapabilityError(
                f"ExportModel(critic_folder={self.critic_folder!r}): {type(pl_module).__name__} has no critic_model(). "
                "Leave critic_folder out, or use CausalLMActorCritic."
            )
        if stage == "fit":
            writes = trainer.is_global_zero
            check_folders("ExportModel", self.folders(trainer), writes=writes, module=pl_module, stage=stage)

    def folders(self, trainer: Trainer) -> list[Path]:
        """Where rank 0 will write."""
        return [self._folder(trainer), *([Path(self.critic_folder)] if self.critic_folder else [])]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the weights on all ranks and write them on the first."""
        module: Any = pl_module
        folder = self._folder(trainer)
        with _whole_weights(trainer, module.model) as weights:
            if trainer.is_global_zero:
                module.model.save_pretrained(folder, state_dict=weights)
                module.tokenizer.save_pretrained(folder)
        if self.critic_folder is not None:
            critic = module.critic_model()
            with _whole_weights(trainer, critic) as weights:
                if trainer.is_global_zero:
                    critic.save_pretrained(self.critic_folder, state_dict=weights)
        trainer.strategy.barrier()

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder) if self.folder else Path(trainer.default_root_dir) / "model"


@contextlib.contextmanager
def _whole_weights(trainer: Trainer, model: nn.Module) -> Any:
    """A model's whole state dictionary on rank 0, for as long as the block lasts."""
    if isinstance(trainer.strategy, ModelParallelStrategy):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        yield get_model_state_dict(model, options=options)
        return
    gathered: Any = contextlib.nullcontext()
    if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.strategy.zero_stage_3:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=None)
    with gathered:
        yield model.state_dict()
