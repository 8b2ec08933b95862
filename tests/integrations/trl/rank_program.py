"""Run by `torchrun` on every rank: trains the tiny model in several settings and saves what came out.

python -m torch.distributed.run --nproc_per_node 2 rank_program.py OUT MODE, where MODE is ``ddp`` or ``zero3``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny
from tests.integrations.trl.settings import SETTINGS, Setting, history, made_of

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.0,
}


def deepspeed_on_cpu() -> None:
    """Without a GPU accelerate takes a DeepSpeed run for a single process, unless its state exists already."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    assert state.num_processes == int(os.environ["WORLD_SIZE"])


def parameters(trained: Any) -> torch.Tensor:
    everything = list(trained.model.parameters())
    if hasattr(everything[0], "ds_id"):
        import deepspeed

        context = deepspeed.zero.GatheredParameters(everything)
    else:
        context = contextlib.nullcontext()
    with context:
        return tiny.parameters(trained)


def run(setting: Setting, mode: str, folder: str) -> dict[str, Any]:
    overrides = dict(setting.options)
    ranks = int(os.environ["WORLD_SIZE"])
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        overrides[name] = overrides.get(name, 8) // ranks
    if mode == "zero3":
        file = Path(folder) / "ds3.json"
        file.write_text(json.dumps(ZERO3))
        overrides |= {"deepspeed": str(file), "use_cpu": False}
        overrides["accelerator_config"] = {"use_configured_state": True}
        AcceleratorState._reset_state()  # one DeepSpeed plugin each; the process group stays
    config = ObjectiveConfig(**tiny.options(**overrides))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, **made_of(setting))
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
    return {"parameters": None if error else parameters(trained), "history": history(trained), "error": error}


def main(out: str, mode: str) -> None:
    results: dict[str, Any] = {}
    if mode == "zero3":
        deepspeed_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in SETTINGS.items():
            if mode in setting.modes:
                results[name] = run(setting, mode, folder)
    torch.save(results, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
