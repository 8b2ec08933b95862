"""``rlobjectives fit|validate|test``: LightningCLI with this library's parts known by their short names."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import rlobjectives.integrations.lightning as integration
from rlobjectives.errors import CapabilityError, UnknownAlgorithmError

__all__ = ["ObjectiveCLI", "run"]

_SUBPARSERS = {command: {"exit_on_error": False} for command in ("fit", "validate", "test")}


class ObjectiveCLI(LightningCLI):
    """The command line of a training run.

    Beside what LightningCLI does: the objective is checked before anything is launched, ``deepspeed_stage_N`` runs on
    CPUs too, Lightning's sampler is off (prompts are shared out by the data module), and the saved configuration of
    an earlier run in the same folder is overwritten. The optimizer belongs to the model's options.
    """

    def before_instantiate_classes(self) -> None:
        """Take in what later steps read."""
        # jsonargparse has accepted the file; what follows may load a model, so the cheap checks come first.
        self.trainer_options = self.config[self.subcommand]["trainer"]
        check_trainer_options(self.trainer_options)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Choose the strategy that this machine can run."""
        options = self.config_init[self.subcommand]["trainer"]
        strategy = integration.resolve_strategy(options.get("strategy", "auto"), str(options.get("accelerator", "auto")))
        return super().instantiate_trainer(**{"strategy": strategy, **kwargs})

    def before_fit(self) -> None:
        """Compare objective, model and data before any process is launched."""
        if isinstance(self.model, integration.ObjectiveMixin):
            self.model.check_objective(self.datamodule)


def check_trainer_options(options: Any) -> None:
    """Refuse trainer options that contradict manual optimization.

    Raises:
        CapabilityError: Saying which option replaces them.
    """
    if options.get("gradient_clip_val"):
        raise CapabilityError(
            f"trainer.gradient_clip_val is {options['gradient_clip_val']}, which does not act here. Give "
            "model.init_args.gradient_clip_val instead."
        )
    if options.get("accumulate_grad_batches", 1) != 1:
        raise CapabilityError(
            f"trainer.accumulate_grad_batches is {options['accumulate_grad_batches']}, which has no meaning here. Leave "
            "it out; model.init_args.micro_batch_size decides how much one backward holds."
        )


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, and run the command.

    Args:
        arguments: The command and its options; by default those of this process.

    Returns:
        0, or 2 when the configuration is wrong; then one message has been printed and nothing was trained.

    Raises:
        Exception: Whatever goes wrong in training itself, with its traceback.
    """
    # The functions and classes that a configuration names usually lie beside it; `python -m` would find them too.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        ObjectiveCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"use_distributed_sampler": False},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={"prog": "rlobjectives", "exit_on_error": False, **_SUBPARSERS},
            args=None if arguments is None else list(arguments),
        )
    except (ArgumentError, CapabilityError, MisconfigurationException, UnknownAlgorithmError) as error:
        print(f"rlobjectives: error: {_sentence(error)}", file=sys.stderr)
        return 2
    return 0


def _sentence(error: Exception) -> str:
    return str(error)
