"""On two ranks: a LoRA policy trains after its self-test, and a model that fails on one rank stops both."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn

from rlobjectives import RLObjectivesError
from rlobjectives.causal_lm import CausalLMPolicy, PromptDataModule
from rlobjectives.causal_lm.sharding import whole_weights
from tests.causal_lm.policy_runs import BY_LAYER
from tests.causal_lm.small_model import ROWS, UNEVEN, policy
from tests.integrations.lightning.runs import make_strategy

PROMPTS = [{"prompt": prompt, "answer": "0"} for prompt in UNEVEN] + ROWS[:4]


class LoRAPolicy(CausalLMPolicy):
    """A policy of which adapters alone are trained."""

    def __init__(self, **options: Any) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(**options)
        torch.manual_seed(3)
        self.model = get_peft_model(self.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        self.model.train()


class Padded(CausalLMPolicy):
    """A policy whose scores depend on padding, on the last rank alone."""

    def score(self, micro_batch: Any) -> Any:
        logprobs, entropy = super().score(micro_batch)
        padding = (micro_batch.attention_mask == 0).sum(1, keepdim=True)
        return logprobs - 0.1 * padding * (self.global_rank == self.trainer.world_size - 1), entropy


def fit(module: CausalLMPolicy, strategy: str = "single", devices: int = 1, **options: Any) -> Trainer:
    """A short run."""
    trainer = Trainer(
        strategy=make_strategy(strategy.split()[0]),
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **{"max_steps": 1, **options},
    )
    data = PromptDataModule(PROMPTS, prompts_per_step=4, num_generations=4, seed=0)
    trainer.fit(module, data)
    return trainer


def weights(module: CausalLMPolicy) -> dict[str, torch.Tensor]:
    """Whole weights of its model by name, on every rank."""
    with whole_weights(module.model) as model:
        found = {name: one.detach() for name, one in model.named_parameters()}
        return {
            name: getattr(one, "full_tensor", lambda one=one: one)().clone() for name, one in found.items()
        }


def one_case(strategy: str, folder: str) -> dict[str, Any]:
    """What came of both policies under a strategy."""
    given = {"micro_batch_size": 3, "seed": 0, "gather_for_sampling": strategy != BY_LAYER}
    error = ""
    try:
        fit(policy(folder, Padded, **given), strategy, 2)
    except RLObjectivesError as raised:
        error = f"{type(raised).__name__}: {raised}"
    module = policy(folder, LoRAPolicy, old_logprobs="behavior", **given)
    start = {name: one.detach().clone() for name, one in module.model.named_parameters()}
    trainer = fit(module, strategy, 2)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "time/" not in name}
    moved = {name for name, one in weights(module).items() if not torch.equal(one.cpu(), start[name])}
    return {"error": error, "metrics": metrics, "moved": moved}


def all_cases(strategies: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    """Every strategy in one set of processes: starting them costs more than training."""
    torch.set_num_threads(1)
    return {strategy: one_case(strategy, folder) for strategy in strategies}


class Hiding(nn.Module):
    """A wrapper whose forward names what it takes, and so loses position ids and the cache."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        self.config = inside.config

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.inside(input_ids=input_ids, attention_mask=attention_mask)
