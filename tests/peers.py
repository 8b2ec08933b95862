"""The loss functions of other projects, imported for comparison where they are installed.

verl imports a serving stack at the top of its modules. What is not installed is replaced, while it imports,
by objects that nobody calls; its loss functions are its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

__all__ = ["liger_loss", "trl_loss", "verl_config", "verl_losses"]


class _Shells:
    """Finds the modules under ``roots``, as empty shells."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        del path, target
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        shell = mock.MagicMock(name=spec.name)
        shell.__path__, shell.__spec__, shell.__name__, shell.__version__ = [], spec, spec.name, "9"
        return shell

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


@contextlib.contextmanager
def _shells() -> Iterator[_Shells]:
    shells = _Shells()
    sys.meta_path.append(shells)
    try:
        yield shells
    finally:
        sys.meta_path.remove(shells)
        _forget(shells.roots)


def _forget(roots: set[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]


@cache
def _verl() -> types.ModuleType | str:
    if importlib.util.find_spec("verl") is None:
        return "verl is not installed"
    with _shells() as shells:
        found = _attempt(shells)
        while found is None:  # one more module has become a shell
            _forget({"verl"})
            found = _attempt(shells)
    return found


def _attempt(shells: _Shells) -> types.ModuleType | str | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("verl.trainer.ppo.core_algos")
    except ModuleNotFoundError as error:
        root = (error.name or "verl").split(".")[0]
        if root in shells.roots | {"verl"}:
            return f"verl cannot be imported: {error}"
        shells.roots.add(root)
        return None
    except Exception as error:  # noqa: BLE001 — whatever stops it, there is nothing to compare with
        return f"verl cannot be imported: {error}"


def verl_losses() -> types.ModuleType:
    """verl's ``core_algos``; skips the test where it cannot be had."""
    found = _verl()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def verl_config(**options: Any) -> Any:
    """An actor configuration of verl."""
    verl_losses()
    kind = importlib.import_module("verl.workers.config.actor").ActorConfig
    return kind(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **options)


def trl_loss(columns: dict[str, Tensor], mask: Tensor, *, loss_type: str, **options: Any) -> Tensor:
    """``GRPOTrainer._compute_loss`` on given log-probabilities; skips the test where TRL is not installed.

    Args:
        columns: ``logprobs``, ``old_logprobs``, ``advantages`` (one per sequence), and ``ref_logprobs`` or
            ``entropy`` where they are read.
        mask: Bool ``[b, t]``.
        loss_type: TRL's name.
        options: What differs from TRL's defaults, by the trainer's attribute or the configuration's field.
    """
    pytest.importorskip("trl")
    grpo = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    arguments = {
        "delta": None,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    arguments.update({name: options.pop(name) for name in list(options) if name in arguments})
    alone = types.SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
        sync_gradients=True,
    )
    stub = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(**arguments),
        accelerator=alone,
        loss_type=loss_type,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=8,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_gamma_weights=grpo.get_gamma_weights,
    )
    for name, value in options.items():
        setattr(stub, name, value)
    stub.get_high_entropy_mask = types.MethodType(grpo.get_high_entropy_mask, stub)
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (
        columns["logprobs"],
        columns.get("entropy", torch.zeros_like(columns["logprobs"])),
        None,
    )
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask.to(columns["logprobs"].dtype),
        "advantages": columns["advantages"],
        "old_per_token_logps": columns["old_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if "ref_logprobs" in columns:
        inputs["ref_per_token_logps"] = columns["ref_logprobs"]
    loss: Tensor = grpo._compute_loss(stub, None, inputs)
    return loss


def liger_loss(columns: dict[str, Tensor], mask: Tensor, **options: Any) -> Tensor:
    """Liger's ``ppo_loss_fn`` on given log-probabilities; skips the test where Liger is not installed."""
    module = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", exc_type=ImportError)
    found = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        per_token_logps=columns["logprobs"],
        attention_mask=mask.to(columns["logprobs"].dtype),
        advantages=columns["advantages"],
        full_attention_mask=mask.to(columns["logprobs"].dtype),
        ref_per_token_logps=columns.get("ref_logprobs"),
        old_per_token_logps=columns["old_logprobs"],
        **{"beta": 0.0, **options},
    )
    loss: Tensor = found[0]
    return loss
