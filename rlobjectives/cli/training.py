"""``rlobjectives fit|validate|test``: LightningCLI with this library's parts known by their short names."""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from rlobjectives.causal_lm import resolve_strategy
from rlobjectives.checks import suggestion
from rlobjectives.cli.failures import ConfigurationError, one_message, reported
from rlobjectives.cli.named import names_in_arguments, names_in_files, spelled_out
from rlobjectives.errors import CapabilityError, CheckpointError
from rlobjectives.integrations.checkpoint_files import trouble_with
from rlobjectives.integrations.lightning import ObjectiveMixin

__all__ = ["ConfigurationError", "ObjectiveCLI", "run"]

_SUBPARSERS = {command: {"exit_on_error": False} for command in ("fit", "validate", "test")}


class ObjectiveCLI(LightningCLI):
    """The command line of a training run.

    Beside what LightningCLI does: ``objective: gdpo`` stands for the parts of that name, the objective is checked
    before anything is launched, ``deepspeed_stage_N`` runs on CPUs too, Lightning's sampler is off (prompts are shared
    out by the data module), and the saved configuration of an earlier run in the same folder is overwritten. The optimizer belongs to the model's options.
    """

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the configuration; what is wrong with it becomes one sentence."""
        given = sys.argv[1:] if args is None else list(args)
        named = names_in_arguments(given)
        with one_message(), names_in_files():
            super().parse_arguments(parser, args if named == given else named)
        # Already here: the next thing LightningCLI does is to look into the checkpoint, and to seed.
        options = self.config.get(self.config.get("subcommand"))
        if options:
            for file in options.get("config") or ():
                text = (getattr(file, "read_text", None) or file.get_content)()  # by release
                check_sections(spelled_out(yaml.safe_load(text)), options)
            check_checkpoint(options.get("ckpt_path"))
            check_run_seed(options.get("seed_everything"))
            # Left open, Lightning unpickles a checkpoint that lies at an address.
            if options.get("weights_only") is None:
                options["weights_only"] = True

    def _parse_ckpt_path(self) -> None:
        """Nothing: LightningCLI would let what a checkpoint calls hyper-parameters overrule the configuration.

        No checkpoint of this library holds any; one that does could name another model, and run that model's code.
        """

    def before_instantiate_classes(self) -> None:
        """Check what can be checked before a model is loaded."""
        check_trainer_options(self.config[self.subcommand]["trainer"])

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; a part that refuses its options speaks for itself."""
        with one_message():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Choose the strategy that this machine can run."""
        options = self.config_init[self.subcommand]["trainer"]
        with one_message("trainer"):
            strategy = resolve_strategy(
                options.get("strategy", "auto"), str(options.get("accelerator", "auto"))
            )
            return super().instantiate_trainer(**{"strategy": strategy, **kwargs})

    def before_fit(self) -> None:
        """Compare objective, model and data before any process is launched."""
        if isinstance(self.model, ObjectiveMixin):
            self.model.check_objective(self.datamodule)


def check_sections(written: Any, taken: Any, place: str = "") -> None:
    """Refuse an empty section of a file that is no option: the parser drops it, and reports only what is in it.

    Args:
        written: What the file says.
        taken: What the parser made of it.
        place: Where that is.

    Raises:
        ConfigurationError: Naming the section.
    """
    if isinstance(written, list) and isinstance(taken, list):
        for number, (mine, theirs) in enumerate(zip(written, taken, strict=False)):
            check_sections(mine, theirs, f"{place}[{number}]")
    if not isinstance(written, dict) or not hasattr(taken, "keys"):
        return
    for key, value in written.items():
        if value == {} and key not in taken and key != "init_args":
            where = f"{place}: " if place else ""
            known = {str(one).partition(".")[0] for one in list(taken.keys())}
            raise ConfigurationError(f"{where}Option {key!r} is not accepted.{suggestion(key, known, '')}")
        if key in taken:
            check_sections(value, taken[key], f"{place}.{key}".lstrip("."))


def check_trainer_options(options: Any) -> None:
    """Refuse trainer options that contradict manual optimization.

    Raises:
        CapabilityError: Saying which option replaces them; or that they are no options at all.
    """
    if not hasattr(options, "get"):
        raise CapabilityError(
            f"trainer is {options!r}; expected options by their names, as {{max_steps: 100}}."
        )
    for name, hint in typing.get_type_hints(Trainer.__init__).items():
        if name in options and options[name] is None and type(None) not in typing.get_args(hint):
            raise CapabilityError(
                f"trainer.{name} is null, which is no value of it. Leave it out for the default."
            )
    if options.get("gradient_clip_val"):
        raise CapabilityError(
            f"trainer.gradient_clip_val is {options['gradient_clip_val']}, which does not act here. Give "
            "model.init_args.gradient_clip_val instead."
        )
    if options.get("accumulate_grad_batches", 1) != 1:
        raise CapabilityError(
            f"trainer.accumulate_grad_batches is {options['accumulate_grad_batches']}, which has no meaning here. "
            "Leave it out; model.init_args.micro_batch_size decides how much one backward holds."
        )


def check_checkpoint(path: Any) -> None:
    """Refuse a file that is no whole checkpoint before anything is built; its contents are verified when it is loaded.

    Raises:
        CheckpointError: With the file's name, which torch does not tell.
    """
    file = None if path is None else Path(str(path))
    if file is not None and file.is_file() and (trouble := trouble_with(file, contents=False)):
        raise CheckpointError(f"ckpt_path {str(path)!r} {trouble}. Take an earlier one.")


def check_run_seed(seed: Any) -> None:
    """Refuse a seed that Lightning's generators cannot take.

    Raises:
        CapabilityError: With the range.
    """
    if seed is not None and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise CapabilityError(f"seed_everything is {seed}; expected an integer from 0 to 4294967295.")


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, and run the command.

    Args:
        arguments: The command and its options; by default those of this process.

    Returns:
        0; or 2 when the configuration is wrong, or 1 when this library found something wrong in the run (a NaN that
        counts, ranks that disagree): then one message has been printed. ``RLOBJECTIVES_DEBUG=1`` shows the traceback.

    Raises:
        Exception: Whatever else goes wrong in training, with its traceback.
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
    except Exception as error:
        status = reported(error)
        if status is None:
            raise
        return status
    return 0
