"""What all ranks of a run must have been given alike: options of the module, its data, the trainer, the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from rlobjectives.descriptions import described
from rlobjectives.distributed import Fault, check_agreement
from rlobjectives.integrations.lightning.files import refuse_folders
from rlobjectives.integrations.lightning.randomness import base_seed

__all__ = ["check_run", "given_options", "optimizer_options", "run_options"]

_TRAINER = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_val",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "num_sanity_val_steps",
    "overfit_batches",
    "precision",
    "reload_dataloaders_every_n_epochs",
    "val_check_interval",
)
"""Options of Lightning's trainer that decide which collectives run and when."""


def given_options(instance: object, frame: FrameType | None) -> dict[str, str]:
    """The arguments that an object's constructors were called with, subclasses' included, in words.

    Args:
        instance: Under construction.
        frame: The frame of one of its constructors; those that called it are looked at too, as
            ``save_hyperparameters`` of Lightning does.
    """
    found: dict[str, str] = {}
    while frame is not None:
        names, rest, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is instance:
            keyword_only = names[1:] + _keyword_only(frame)
            given = {name: values[name] for name in keyword_only if name in values}
            given |= values.get(keywords, {}) if keywords else {}
            given |= {rest: values[rest]} if rest and values.get(rest) else {}
            found |= {name: described(value, objects=False) for name, value in given.items()}
        frame = frame.f_back
    return found


def check_run(module: Any) -> None:
    """Check a module's objective and folders, and its options against those of all other ranks. One exchange.

    Args:
        module: An `ObjectiveMixin` attached to a trainer, at set-up.

    Raises:
        CapabilityError: If the objective does not fit, or a folder cannot be written; `RankError` on other ranks.
        RankError: If ranks were given different options.
    """
    fault, options = Fault(), dict[str, object]()
    with fault.guard():
        module.check_objective(getattr(module.trainer, "datamodule", None))
        refuse_folders(module.trainer)
        options = run_options(module)
    check_agreement(options, fault=fault)


def run_options(module: Any) -> dict[str, object]:
    """Everything that must be the same on all ranks and is known at set-up, by name.

    Args:
        module: An `ObjectiveMixin` attached to a trainer.
    """
    trainer = module.trainer
    options = _options_of(module, {"objective", "seed"})
    options["seed"] = base_seed(module.seed)
    options |= {f"objective.{name}": words for name, words in module.objective.descriptions().items()}
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        options |= {f"{type(data).__name__}.{name}": one for name, one in _options_of(data, {"seed"}).items()}
        facts: Mapping[str, object] = getattr(data, "agreement_facts", dict)()
        options |= {f"{type(data).__name__}.{name}": one for name, one in facts.items()}
    options |= {f"Trainer.{name}": getattr(trainer, name, None) for name in _TRAINER}
    # What the key of a checkpoint's state says: its kind, what it monitors, and when it saves.
    options["Trainer.callbacks"] = sorted(one.state_key for one in trainer.checkpoint_callbacks)
    return options


def optimizer_options(optimizer: Any) -> dict[str, object]:
    """The plain options of an optimizer's parameter groups, by group and name."""
    return {
        f"optimizer group {place}: {name}": described(option)
        for place, group in enumerate(optimizer.param_groups)
        for name, option in group.items()
        if name != "params" and _plain(option)
    }


def _options_of(holder: Any, apart: Iterable[str]) -> dict[str, object]:
    """Constructor arguments in words; where a plain attribute of that name has changed since, what it is now."""
    left_out = {*apart, *(name for kind in type(holder).__mro__ for name in vars(kind).get("may_differ", ()))}
    # Of another project's data module: the attributes that bear the names of its constructor's arguments.
    names = dict.fromkeys(inspect.signature(type(holder).__init__).parameters, "")
    unrecorded = {name: words for name, words in names.items() if _plain(vars(holder).get(name, holder))}
    given: Mapping[str, str] = vars(holder).get("_options_given", unrecorded)
    return {
        name: described(vars(holder)[name]) if _plain(vars(holder).get(name, holder)) else words
        for name, words in given.items()
        if name not in left_out
    }


def _plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _keyword_only(frame: FrameType) -> list[str]:
    code = frame.f_code
    return list(code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount])
