"""Rank program: train the toy policy under several strategies and save what happened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader

from rlobjectives import PaddedLayout, Rollouts
from rlobjectives.integrations.lightning import DeepSpeedCPUStrategy, Experience
from tests.integrations.lightning.toy import GROUPS, VOCABULARY, ToyPolicy, experience


def make_strategy(name: str) -> Strategy | str:
    """A fresh strategy that really shards, even a few weights."""
    if name == "ddp":
        return DDPStrategy()
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if name == "single":
        return "auto"
    strategy = DeepSpeedCPUStrategy(stage=int(name[-1]))
    if name == "zero3":
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def fit(
    policy: ToyPolicy, strategy: str, *, rollouts: int, folder: str | None = None, **options: Any
) -> ToyPolicy:
    """Train on so many rollouts."""
    callbacks = []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = Trainer(
        strategy=make_strategy(strategy),
        accelerator="cpu",
        devices=1 if strategy == "single" else 2,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=folder is not None,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{key: value for key, value in options.items() if key != "ckpt_path"},
    )
    trainer.fit(policy, DataLoader(torch.arange(rollouts)), ckpt_path=options.get("ckpt_path"))
    return policy


def uneven(rank: int | None, rollout: int) -> Experience:
    """Nine sequences on rank 0, two on rank 1."""
    return experience(GROUPS[rank or 0], seed=10 * (rank or 0) + rollout)


def idle(rank: int | None, rollout: int) -> Experience:
    """Nothing on rank 1."""
    return experience(GROUPS[0] if rank == 0 else (), seed=rollout)


def masked_in_between(rank: int | None, rollout: int) -> Experience:
    """The second rollout has no counted token on any rank."""
    return experience(GROUPS[rank or 0], seed=10 * (rank or 0) + max(rollout - 1, 0), masked=rollout == 1)


def never_masked(rank: int | None, rollout: int) -> Experience:
    """What `masked_in_between` is without its second rollout."""
    return experience(GROUPS[rank or 0], seed=10 * (rank or 0) + rollout)


def sampled(rank: int | None, rollout: int) -> Experience:
    """Drawn from the global generator, as generation does; the batch says nothing."""
    del rank, rollout
    ids = torch.randint(0, VOCABULARY, (4, 5))
    mask = torch.arange(5).expand(4, 5) >= 1
    return Experience(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        layout=PaddedLayout(mask),
        rollouts=Rollouts(rewards=torch.rand(4, 2), group_ids=torch.tensor([0, 0, 1, 1])),
        ref_logprobs=torch.full((4, 5), -1.5),
    )


def cases(strategy: str, folder: str) -> dict[str, Callable[[], Any]]:
    """Each case's name and what it saves."""
    several = {"epochs_per_rollout": 2, "windows_per_rollout": 2}

    def run(source: Any, rollouts: int = 1, **options: Any) -> dict[str, Any]:
        policy = fit(ToyPolicy(source, **options), strategy, rollouts=rollouts)
        return {"trace": policy.trace, "backwards": policy.backwards}

    def resume() -> dict[str, Any]:
        whole = fit(ToyPolicy(sampled, adam=True, seed=3, **several), strategy, rollouts=4)
        fit(
            ToyPolicy(sampled, adam=True, seed=3, **several), strategy, rollouts=4, max_steps=8, folder=folder
        )
        torch.manual_seed(99)  # a resumed process does not stand where the stopped one stood
        rest = ToyPolicy(sampled, adam=True, **several)
        fit(rest, strategy, rollouts=4, ckpt_path=f"{folder}/step=8.ckpt")
        return {"whole": whole.trace, "rest": rest.trace}

    return {
        "uneven": lambda: run(uneven),
        "idle": lambda: run(idle),
        "clipped": lambda: run(uneven, gradient_clip_val=0.05),
        "empty": lambda: run(masked_in_between, 3, adam=True),
        "not_empty": lambda: run(never_masked, 2, adam=True),
        "several": lambda: run(uneven, 2, **several),
        "resume": resume,
    }


def main(out: str, folder: str, *strategies: str) -> None:
    """Run all cases under each strategy; each rank saves its own view."""
    found: dict[str, Any] = {}
    for strategy in strategies:
        for name, case in cases(strategy, f"{folder}/{strategy}").items():
            found[f"{strategy}/{name}"] = case()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(found, f"{out}.{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
