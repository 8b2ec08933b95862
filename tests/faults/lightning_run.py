"""A run of Lightning's Trainer: a tiny language model that samples, is scored and learns; a checkpoint a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from rlobjectives.causal_lm import CausalLMPolicy, PromptDataModule
from rlobjectives.integrations.lightning import Experience
from tests.causal_lm.small_model import ROWS
from tests.faults.injection import active, objective
from tests.integrations.lightning.runs import make_strategy
from tests.integrations.lightning.toy import full_weights

STEPS = 3


class Policy(CausalLMPolicy):
    """A policy with places where things go wrong."""

    def complete(self, *inputs: Any, **options: Any) -> Any:
        active.begin_rollout()
        active.at("sampling")
        return super().complete(*inputs, **options)

    def score(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None]:
        active.at("forward")
        logprobs, entropy = super().score(micro_batch)
        if logprobs.requires_grad:
            logprobs.register_hook(lambda gradient: active.at("backward"))
        return active.spoil("logprobs", logprobs), entropy

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        optimizer = found["optimizer"] if isinstance(found, dict) else found[0][0]
        optimizer.register_step_pre_hook(lambda *_: active.at("step"))
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trainer.world_size > 1 and self.global_rank and not _writes_everywhere(self.trainer):
            active.at("save")


def _writes_everywhere(trainer: Trainer) -> bool:
    return type(trainer.strategy).__name__ != "DDPStrategy"


def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Longer is better; one rank may find something else."""
    active.at("reward")
    return active.spoil("rewards", [min(1.0, len(text) / 6) for text in completions])


def digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of digits."""
    return [sum(one.isdigit() for one in text) / max(1, len(text)) for text in completions]


def run(job: dict[str, Any]) -> Tensor:
    """Train, from the beginning or from a checkpoint."""
    odd = job["fault"].get("name", "") if active.mine else ""
    policy = Policy(
        objective=objective(clip_high=0.3) if odd == "other-objective" else objective(),
        rewards=[length, digits],
        model_name_or_path=job["model"],
        max_new_tokens=6,
        learning_rate=2e-2 if odd == "other-rate" else 1e-2,
        epochs_per_rollout=2 if odd == "other-epochs" else 1,
        micro_batch_size=8 if odd == "other-cut" else 4,
        seed=0,
    )
    trainer = Trainer(
        strategy=make_strategy(job["strategy"]),
        accelerator="cpu",
        devices=job["ranks"],
        max_steps=STEPS,
        logger=False,
        callbacks=[ModelCheckpoint(job["saves"], "{step}", every_n_train_steps=1, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job["logs"],
    )
    data = PromptDataModule(ROWS, prompts_per_step=2 * job["ranks"], num_generations=4, seed=0)
    trainer.fit(policy, data, ckpt_path=job["resume"])
    return full_weights(policy)


def checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step=*.ckpt"), reverse=True)
