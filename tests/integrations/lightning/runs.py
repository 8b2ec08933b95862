"""On two ranks: train the toy policy under a strategy and report what happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader

from rlobjectives import PaddedLayout, RLObjectivesError, Rollouts
from rlobjectives.causal_lm import DeepSpeedCPUStrategy
from rlobjectives.integrations.lightning import Experience
from tests.integrations.damage import flip_a_bit
from tests.integrations.lightning.toy import GROUPS, VOCABULARY, ToyPolicy, experience

SEVERAL = {"epochs_per_rollout": 2, "windows_per_rollout": 2, "adam": True}


def make_strategy(name: str) -> Strategy | str:
    """A fresh strategy that really shards, even a few weights."""
    if name == "single":
        return "auto"
    if name == "ddp":
        return DDPStrategy()
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    strategy = DeepSpeedCPUStrategy(stage=int(name[-1]))
    if name == "zero3":
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def fit(
    policy: ToyPolicy,
    strategy: str,
    *,
    rollouts: int,
    folder: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> ToyPolicy:
    """Train on so many rollouts."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        strategy=make_strategy(strategy),
        accelerator="cpu",
        devices=1 if strategy == "single" else 2,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=folder is not None,
        callbacks=[] if folder is None else [saving],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(policy, DataLoader(torch.arange(rollouts)), ckpt_path=resume)
    return policy


def uneven(rank: int | None, rollout: int) -> Experience:
    """Nine sequences on rank 0, two on rank 1."""
    return experience(GROUPS[rank or 0], seed=10 * (rank or 0) + rollout)


def idle(rank: int | None, rollout: int) -> Experience:
    """Nothing on rank 1."""
    return experience(() if rank else GROUPS[0], seed=rollout)


def masked_in_between(rank: int | None, rollout: int) -> Experience:
    """As `uneven`, with a rollout before the last of which nothing counts on any rank."""
    return experience(GROUPS[rank or 0], seed=10 * (rank or 0) + max(rollout - 1, 0), masked=rollout == 1)


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


def broken_on_rank_1(rank: int | None, rollout: int) -> Experience:
    """A reward function that fails on one rank."""
    if rank == 1:
        raise ZeroDivisionError("the reward function divides by zero")
    return uneven(rank, rollout)


def run(
    strategy: str, source: Callable[..., Experience], rollouts: int = 1, **options: Any
) -> dict[str, Any]:
    """Train and give what the policy saw."""
    policy = fit(ToyPolicy(source, **options), strategy, rollouts=rollouts)
    return {"trace": policy.trace, "backwards": policy.backwards}


def stop_and_resume(strategy: str, folder: Path) -> dict[str, Any]:
    """Four rollouts of four steps at once; and stopped at a rollout's end, or inside one, and resumed."""
    found = {"whole": fit(Watched(seed=3), strategy, rollouts=4)}
    for name, stop in (("rest", 8), ("rest inside", 6)):
        place = folder / name
        fit(Watched(seed=3), strategy, rollouts=4, max_steps=stop, folder=place)
        torch.manual_seed(99)  # a resumed process does not stand where the stopped one stood
        found[name] = fit(Watched(), strategy, rollouts=4, resume=place / f"step={stop}.ckpt", max_steps=16)
    traces: dict[str, Any] = {name: policy.trace for name, policy in found.items()}
    begun = {name: policy.begun for name, policy in found.items()}
    return {**traces, "begun": begun, "damaged": refused(strategy, folder / "rest" / "step=8.ckpt")}


def refused(strategy: str, path: Path) -> str:
    """What a checkpoint says of which one bit of one rank's weights has changed."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        files = [path] if path.is_file() else sorted(path.rglob("*0*.*pt*")) + sorted(path.rglob("*.distcp"))
        flip_a_bit(files[-1])
    try:
        fit(Watched(), strategy, rollouts=4, resume=path)
    except RLObjectivesError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Watched(ToyPolicy):
    """Several updates on samples, and where each rollout began."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(sampled, seed=seed, **SEVERAL)
        self.begun: list[int] = []

    def rollout(self, batch: torch.Tensor) -> Experience:
        self.begun.append(self.trainer.global_step)
        return super().rollout(batch)


KILLED = {"ddp": (0, 3), "zero3": (1, 6)}
"""Who is killed in which of its calls of `torch.save`: in its third checkpoint, half of which is then written."""


def killed_while_saving(strategy: str, folder: str) -> None:
    """Four rollouts, of which a rank does not see the end."""
    victim, call = KILLED[strategy]
    save, calls = torch.save, []

    def killed(content: Any, file: Any, *rest: Any, **options: Any) -> None:
        calls.append(file)
        save(content, file, *rest, **options)
        if len(calls) == call and torch.distributed.get_rank() == victim:
            with Path(file).open("r+b") as half:
                half.truncate(3000)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = killed
    fit(Watched(seed=3), strategy, rollouts=4, folder=Path(folder))


def resumed_after_kill(strategy: str, folder: str) -> list[dict[str, Any]]:
    """What is left of the four rollouts after the last whole checkpoint."""
    place = Path(folder)
    return fit(Watched(), strategy, rollouts=4, folder=place / "rest", resume=place / "step=8.ckpt").trace


def all_cases(strategies: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    """Every case of every strategy, in one set of processes: starting them costs more than training."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        found[strategy] = {
            "uneven": run(strategy, uneven),
            "idle": run(strategy, idle),
            "clipped": run(strategy, uneven, gradient_clip_val=0.05),
        }
        if strategy in ("zero1", "zero2"):  # differ from zero3 in what is sharded, which the above has seen
            continue
        found[strategy]["empty"] = run(strategy, masked_in_between, 3, adam=True)
        found[strategy]["not empty"] = run(strategy, uneven, 2, adam=True)
        found[strategy]["several"] = run(strategy, uneven, **SEVERAL)
        found[strategy]["resumed"] = stop_and_resume(strategy, Path(folder) / strategy)
    return found


def break_one_rank() -> None:
    """Raises on every rank."""
    run("ddp", broken_on_rank_1)
