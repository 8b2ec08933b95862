"""Train the small language model on samples of earlier weights, whole and interrupted, and tell who sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from rlobjectives import GRPO, P3O, Objective
from rlobjectives.causal_lm import CausalLMPolicy, PolicySnapshots, PromptDataModule
from tests.causal_lm.policy_runs import BY_LAYER
from tests.causal_lm.small_model import ROWS, policy
from tests.integrations.lightning.runs import make_strategy
from tests.integrations.lightning.toy import full_weights

ROLLOUTS, STOP = 4, 2
AGES = [0, 1, 2, 1]
"""With a snapshot every second rollout, up to two rollouts old."""


class Watched(CausalLMPolicy):
    """Keeps what each rollout was sampled from."""

    def rollout(self, batch: Any) -> Any:
        before = full_weights(self.model)
        experience = super().rollout(batch)
        after = full_weights(self.model)
        seen = vars(self).setdefault("seen", [])
        seen.append(
            {
                "age": self.snapshots.age if self.snapshots else 0,
                "weights": before,
                "restored": torch.equal(before, after),
                "ids": experience.input_ids,
                "attention": experience.attention_mask,
                "mask": experience.layout.mask,
                "logprobs": experience.behavior_logprobs,
            }
        )
        return experience


def watched(folder: str, **options: Any) -> Any:
    """The policy of these tests: P3O, on samples of earlier weights."""
    given = {
        "objective": Objective(estimator=GRPO(), policy_loss=P3O()),
        "snapshots": PolicySnapshots(interval=2, max_staleness=2),
        "learning_rate": 3e-2,
        "micro_batch_size": 4,
        "windows_per_rollout": 2,
        "seed": 3,
    }
    return policy(folder, kind=Watched, **{**given, **options})


def fit(
    module: CausalLMPolicy,
    strategy: str,
    *,
    rollouts: int,
    resume: Path | None = None,
    root: Path,
    ranks: int = 2,
) -> Trainer:
    """Train on so many rollouts of two windows."""
    trainer = Trainer(
        strategy=make_strategy(strategy.split()[0]),
        accelerator="cpu",
        devices=ranks,
        max_steps=2 * rollouts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    data = PromptDataModule(ROWS, prompts_per_step=4, num_generations=4, seed=0)
    trainer.fit(module, data, ckpt_path=resume, weights_only=None if resume is None else False)
    return trainer


def whole_and_resumed(strategy: str, folder: str, root: str, ranks: int = 2) -> dict[str, Any]:
    """All rollouts at once, and the same with a checkpoint after some of them."""
    place, options = Path(root) / strategy.replace(" ", "_"), {"gather_for_sampling": strategy != BY_LAYER}
    whole = watched(folder, **options)
    trainer = fit(whole, strategy, rollouts=ROLLOUTS, root=place, ranks=ranks)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    first = watched(folder, **options)
    fit(first, strategy, rollouts=STOP, root=place, ranks=ranks).save_checkpoint(place / "half.ckpt")
    torch.manual_seed(99)
    rest = watched(folder, **options)
    fit(rest, strategy, rollouts=ROLLOUTS, resume=place / "half.ckpt", root=place, ranks=ranks)
    return {
        "whole": whole.seen,
        "rest": rest.seen,
        "metrics": metrics,
        "end": full_weights(whole.model),
        "resumed end": full_weights(rest.model),
    }


def all_strategies(strategies: tuple[str, ...], folder: str, root: str) -> dict[str, dict[str, Any]]:
    """Every strategy in one set of processes."""
    torch.set_num_threads(1)
    return {strategy: whole_and_resumed(strategy, folder, root) for strategy in strategies}
