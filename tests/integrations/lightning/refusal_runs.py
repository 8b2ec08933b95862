"""On two ranks: what only one of them can see stops both."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from rlobjectives import Objective, ReMax, RLObjectivesError
from rlobjectives.causal_lm import PromptDataModule
from rlobjectives.causal_lm.callbacks import SaveCompletions
from rlobjectives.integrations.lightning import Experience
from tests.causal_lm.small_model import ROWS, long_answer, policy
from tests.integrations.lightning.runs import fit, make_strategy, uneven
from tests.integrations.lightning.toy import ToyPolicy
from tests.integrations.lightning.toy_critic import ToyAgent, cut_off

ONE_TOO_LONG = [{"prompt": prompt, "answer": "0"} for prompt in ("1+1=", "12+34-56+78=")]
"""A prompt for each of two ranks, the second above eight tokens."""


def refused(folder: str, unwritable: str) -> dict[str, str]:
    """The error of a folder that rank 0 cannot write to, and of logits that are no numbers on rank 1."""
    torch.set_num_threads(1)
    return {
        "folder": _error(folder, [SaveCompletions(unwritable)], spoil=False),
        "logits": _error(folder, [], spoil=True),
        "validation": _validation_error(folder),
        "truncated": _cut_on_one_rank(),
    }


def own_lists(folder: str, unwritable: str) -> dict[str, Any]:
    """What rank 0 alone writes: a log and completions, which go first where it can write, then where it cannot."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, place in (("written", folder), ("refused", unwritable)):
        first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
        trainer = Trainer(
            strategy="ddp",
            accelerator="cpu",
            devices=2,
            max_steps=1,
            log_every_n_steps=1,
            logger=CSVLogger(folder, name=name) if first else False,
            callbacks=[SaveCompletions(place)] if first else [],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(ToyPolicy(uneven), DataLoader(torch.arange(2)))
            found[name] = trainer.global_step
        except RLObjectivesError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def refused_samples(folder: str, strategies: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Per strategy, the error of what goes wrong on one rank before and while the ranks sample together."""
    torch.set_num_threads(1)
    bounded = {"max_prompt_tokens": 8, "max_new_tokens": 4}
    validation = {"val_dataset": ONE_TOO_LONG, "val_batch_size": 1}
    return {
        strategy: {
            "training": _told(policy(folder, **bounded), [], strategy, rows=ONE_TOO_LONG),
            "validation": _told(policy(folder, **bounded, val_samples=1), [], strategy, **validation),
            "sampling": _sampling_error(folder, strategy),
        }
        for strategy in strategies
    }


def _sampling_error(folder: str, strategy: str) -> str:
    """A sampling that fails on rank 1, before both ranks complete every prompt once more."""
    objective = Objective(estimator=ReMax())
    module = policy(folder, objective=objective, rewards=[long_answer], max_new_tokens=4)
    complete = module.complete

    def failing(*inputs: Any, greedy: bool = False) -> Any:
        found = complete(*inputs, greedy=greedy)
        if module.global_rank == 1 and not greedy:
            raise ValueError("no engine here")
        return found

    module.complete = failing
    return _told(module, [], strategy)


def _error(folder: str, callbacks: list[Any], *, spoil: bool) -> str:
    module = policy(folder, max_new_tokens=12)
    complete = module.complete

    def spoiled(*inputs: Any, **options: Any) -> Any:
        if module.global_rank == 1:
            module.model.lm_head.weight.data.fill_(torch.nan)
        return complete(*inputs, **options)

    if spoil:
        module.complete = spoiled
    return _told(module, callbacks)


def _validation_error(folder: str) -> str:
    """A reward function that fails on rank 1, in the first of two validation batches, where ranks sample together."""
    module = policy(folder, max_new_tokens=4, val_samples=1)
    transcribe, batches = module.transcribe, []

    def broken(*inputs: Any, **options: Any) -> Any:
        batches.append(inputs)
        if module.global_rank == 1 and len(batches) == 1:  # the greedy answers of the first batch
            raise ValueError("no verifier here")
        return transcribe(*inputs, **options)

    module.transcribe = broken
    told = _told(module, [], strategy="fsdp2", val_dataset=ROWS[:8], val_batch_size=2)
    return f"{told} after {len(batches)} transcripts"


def _cut_on_one_rank() -> str:
    """Only rank 0 says which of its sequences were cut off."""
    try:
        fit(ToyAgent(source=_half_known, bootstrap_truncated=True), "ddp", rollouts=1)
    except RLObjectivesError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _half_known(rank: int | None, rollout: int) -> Experience:
    return uneven(rank, rollout) if rank else cut_off(rank, rollout)


def _told(module: Any, callbacks: list[Any], strategy: str = "ddp", rows: Any = ROWS, **data: Any) -> str:
    trainer = Trainer(
        strategy=make_strategy(strategy),
        accelerator="cpu",
        devices=2,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    try:
        trainer.fit(module, PromptDataModule(rows, prompts_per_step=2, num_generations=4, seed=0, **data))
    except (RLObjectivesError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
