"""On two ranks: a value model in a plain module, and the language-model agent, under a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from rlobjectives import GAE, ClippedValueLoss, KLPenalty, Objective
from rlobjectives.causal_lm import CausalLMActorCritic, ExportModel, PromptDataModule
from rlobjectives.causal_lm.callbacks.export import _whole_weights
from rlobjectives.causal_lm.sharding import shard_blocks
from rlobjectives.integrations.transformers import CausalLMWithValue
from tests.causal_lm.small_model import ROWS, has_digit, long_answer
from tests.integrations.lightning.runs import make_strategy
from tests.integrations.lightning.toy import full_weights

IDS = torch.tensor([[9, 9, 4, 5, 6], [9, 7, 8, 3, 2], [1, 2, 3, 4, 5], [6, 5, 4, 9, 9]])
EXISTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def small_critic() -> CausalLMWithValue:
    """An untied backbone, whose output layer no value reads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return CausalLMWithValue.copy_of(LlamaForCausalLM(config))


class ValueFit(LightningModule):
    """One step of SGD on made-up targets; keeps what the critic says before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = small_critic()
        self.said: list[Tensor] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard_blocks(self.critic, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        trainable = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.SGD(trainable, lr=0.5)

    def train_dataloader(self) -> Any:
        share = slice(None)
        if self.trainer.world_size > 1:
            share = slice(2 * self.global_rank, 2 * self.global_rank + 2)
        return DataLoader(TensorDataset(IDS[share], EXISTS[share]), batch_size=4)

    def training_step(self, batch: Any) -> Tensor:
        ids, exists = batch
        self.said.append(self.critic(IDS, EXISTS).detach())
        # Of each sequence by itself, so that the mean over ranks is the mean over all of them.
        return (self.critic(ids, exists) - 1.0).square().mean(1).mean()


def value_step(strategy: str, folder: str) -> dict[str, Any]:
    """One step, and the critic on disk."""
    module = ValueFit()
    trainer = Trainer(
        strategy=make_strategy(strategy), devices=1 if strategy == "single" else 2, max_epochs=2, **QUIET
    )
    trainer.fit(module)
    with _whole_weights(trainer, module.critic) as weights:
        if trainer.is_global_zero:
            module.critic.save_pretrained(folder, state_dict=weights)
    trainer.strategy.barrier()
    return {"before": module.said[0], "after": module.said[1]}


def agent(folder: str, **options: Any) -> CausalLMActorCritic:
    """The small language model with a critic; sampled answers to sums."""
    objective = Objective(
        estimator=GAE(trace_decay=0.9, normalize="window"),
        value_loss=ClippedValueLoss(clip=0.2),
        kl=KLPenalty(coef=0.05),
        entropy_coef=0.001,
    )
    given: dict[str, Any] = {
        "objective": objective,
        "rewards": [has_digit, long_answer],
        "model_name_or_path": folder,
        "max_new_tokens": 6,
        "micro_batch_size": 6,
        "learning_rate": 1e-2,
        "critic_learning_rate": 1e-2,
        "seed": 3,
    }
    return CausalLMActorCritic(**{**given, **options})


def agent_run(strategy: str, folder: str, root: str, steps: int = 4, **options: Any) -> dict[str, Any]:
    """A short run with a warm-up and passes for the critic; the critic is exported at the end."""
    module = agent(folder, **{"critic_warmup_steps": 2, "critic_epochs": 1, **options})
    start = full_weights(module.model)
    seen: list[dict[str, Any]] = []

    def record(*_: Any) -> None:
        moved = not torch.equal(full_weights(module.model), start)
        seen.append({"moved": moved, "metrics": dict(module.trainer.callback_metrics)})

    module.on_train_batch_end = record
    place = Path(root) / strategy
    trainer = Trainer(
        strategy=make_strategy(strategy),
        devices=1 if strategy == "single" else 2,
        max_steps=steps,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[ExportModel(str(place / "policy"), critic_folder=str(place / "critic"))],
        default_root_dir=root,
        **QUIET,
    )
    trainer.fit(module, PromptDataModule(ROWS, prompts_per_step=4, num_generations=4, seed=1))
    head = full_weights(module.value_head)
    return {"seen": seen, "head": head}


def all_cases(strategies: tuple[str, ...], model: str, root: str) -> dict[str, dict[str, Any]]:
    """Every case of every strategy, in one set of processes."""
    return {
        strategy: {
            "value": value_step(strategy, f"{root}/{strategy}-value"),
            "own": agent_run(strategy, model, f"{root}/own"),
            "shared": agent_run(strategy, model, f"{root}/shared", critic_backbone="shared"),
        }
        for strategy in strategies
    }
