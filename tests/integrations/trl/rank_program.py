"""Run by `torchrun` on every rank: trains the tiny model in several settings and saves what came out.

python -m torch.distributed.run --nproc_per_node 2 rank_program.py OUT MODE, where MODE is ``ddp`` or ``zero3``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.trl import tiny
from integrations.trl.settings import SETTINGS, Setting, objectives
from trl import GRPOConfig

from rlobjectives.integrations.trl import ObjectiveGRPOTrainer

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.0,
}


def parameters(trained: Any) -> torch.Tensor:
    everything = list(trained.model.parameters())
    if hasattr(everything[0], "ds_id"):
        import deepspeed

        context = deepspeed.zero.GatheredParameters(everything)
    else:
        context = contextlib.nullcontext()
    with context:
        return tiny.parameters(trained)


def run(setting: Setting, objective: Any, mode: str, folder: str) -> dict[str, Any]:
    overrides = dict(setting.options)
    ranks = dist.get_world_size() if dist.is_initialized() else int(__import__("os").environ["WORLD_SIZE"])
    overrides["per_device_train_batch_size"] = overrides.get("per_device_train_batch_size", 8) // ranks
    if mode == "zero3":
        file = Path(folder) / "ds3.json"
        file.write_text(json.dumps(ZERO3))
        overrides |= {"deepspeed": str(file), "use_cpu": False}
    trained = tiny.trainer(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options(**overrides)), objective=objective)
    if mode == "zero3":
        assert str(trained.accelerator.distributed_type).endswith("DEEPSPEED")
    if setting.spoil is not None:
        setting.spoil(trained)
    error = None
    try:
        trained.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        if not setting.fails:
            raise
    history = [entry for entry in trained.state.log_history if "window/tokens" in entry]
    return {"parameters": None if error else parameters(trained), "history": history, "error": error}


def main(out: str, mode: str) -> None:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in SETTINGS.items():
            if mode not in setting.modes:
                continue
            for label, objective in objectives(setting, mode).items():
                results[f"{name}/{label}"] = run(setting, objective, mode, folder)
    torch.save(results, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
