"""On two ranks: train the small language model under a strategy and report what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from rlobjectives.causal_lm import PromptDataModule
from rlobjectives.causal_lm.callbacks import ExportModel
from rlobjectives.causal_lm.sharding import is_sharded
from tests.causal_lm.small_model import ROWS, UNEVEN, policy
from tests.integrations.lightning.runs import make_strategy

BY_LAYER = "zero3 by layer"
"""ZeRO-3, gathering layer by layer while sampling."""


def short_run(strategy: str, folder: str, root: str) -> dict[str, Any]:
    """Two steps with validation before and after; prompts of uneven lengths, completions that end at any time."""
    rows = [{"prompt": prompt, "answer": "0"} for prompt in UNEVEN] + ROWS[:5]
    # Longer than one check of "all done", so that a rank that ends early may have to wait for the other.
    module = policy(
        folder,
        micro_batch_size=3,
        max_new_tokens=12,
        val_samples=1,
        seed=0,
        gather_for_sampling=strategy != BY_LAYER,
    )
    start = [parameter.detach().clone() for parameter in module.model.parameters()]
    sharded: list[bool] = []
    complete = module.complete

    def watched(*inputs: Any, **options: Any) -> Any:
        sharded.append(is_sharded(module.model))
        return complete(*inputs, **options)

    module.complete = watched
    data = PromptDataModule(
        rows, prompts_per_step=2, num_generations=5, val_dataset=rows, val_batch_size=2, seed=0
    )
    trainer = Trainer(
        strategy=make_strategy(strategy.split()[0]),
        accelerator="cpu",
        devices=2,
        max_steps=2,
        num_sanity_val_steps=-1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ExportModel(str(Path(root) / strategy))],
        default_root_dir=root,
    )
    trainer.fit(module, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "metrics": {name: value for name, value in metrics.items() if not name.startswith("time/")},
        "history": module.validation_history,
        "start": start,
        "sharded": set(sharded),
    }


def short_runs(strategies: tuple[str, ...], folder: str, root: str) -> dict[str, dict[str, Any]]:
    """Every strategy in one set of processes: starting them costs more than training."""
    torch.set_num_threads(1)
    return {strategy: short_run(strategy, folder, root) for strategy in strategies}
