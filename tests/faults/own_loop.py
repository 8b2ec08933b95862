"""A training loop of a user's own, as README has it: DDP, guarded, ending together, with dummies, and a checkpoint after every step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rlobjectives import GradientScale, PaddedLayout, Rollouts, TokenBatch, ends_together
from rlobjectives.distributed import Communicator
from rlobjectives.integrations.checkpoint_files import trouble_with
from tests.faults.injection import active, objective
from tests.integrations.lightning.toy import VOCABULARY, Net

STEPS, SEQUENCES, GROUP, WIDTH = 3, 8, 4, 6


def sample(step: int) -> torch.Tensor:
    """Token ids of this rank's sequences."""
    active.begin_rollout()
    active.at("sampling")
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, VOCABULARY, (SEQUENCES, WIDTH), generator=generator)


def reward(ids: torch.Tensor) -> torch.Tensor:
    """Two rewards of each sequence."""
    active.at("reward")
    rows = [[float(row.sum() % 3), float(row[1] % 2)] for row in ids]
    rows = active.spoil("rewards", rows)
    if rows and isinstance(rows[0], float):  # a NaN for a whole row
        rows[0] = [rows[0], 0.0]
    return torch.tensor(rows)


def logprobs(policy: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each token, ``[n, t]``."""
    active.at("forward")
    scores = policy(ids[:, :-1]).log_softmax(-1)
    found = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
    found.register_hook(lambda gradient: active.at("backward"))
    return active.spoil("logprobs", found)


def take_step(policy: Any, optimizer: Any, goal: Any, step: int, size: int, losses: int | None) -> None:
    """One rollout and one optimizer step on it."""
    builder = goal.window(Communicator.world())
    rows = [slice(start, start + size) for start in range(0, SEQUENCES, size)]
    with builder.guard():
        ids = sample(step)
        layout = PaddedLayout(torch.ones(SEQUENCES, WIDTH - 1, dtype=torch.bool))
        groups = torch.arange(SEQUENCES) // GROUP
        rollouts = Rollouts(rewards=reward(ids), group_ids=groups, layout=layout)
        estimate = goal.estimator.estimate(rollouts)
        for r in rows:
            builder.add(estimate=estimate[r], layout=layout.rows(r))
    window = builder.freeze()
    outputs, count = [], window.micro_batches if losses is None else losses
    for position in range(count):
        r = rows[min(position, len(rows) - 1)]
        dummy = position >= len(rows)
        here = layout.rows(r).with_mask(layout.mask[r] & (not dummy))
        last = position == count - 1
        with contextlib.nullcontext() if last else policy.no_sync():
            tokens = TokenBatch(
                logprobs=logprobs(policy, ids[r]),
                advantages=window.advantages(estimate[r], here),
                layout=here,
            )
            output = window.loss(tokens)
            (output.loss * GradientScale.for_ddp().factor).backward()
        outputs.append(output)
    window.summarize(outputs)
    if not window.empty:
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, step: int, policy: Any, optimizer: Any) -> None:
    """A checkpoint that is whole or not there; rank 0 writes it."""
    if dist.get_rank() == 0:
        state = {"step": step, "weights": policy.module.state_dict(), "optimizer": optimizer.state_dict()}
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "unfinished"
        torch.save(state, unfinished)
        os.replace(unfinished, folder / f"step-{step}.pt")
    else:
        active.at("save")
    dist.barrier()


def run(job: dict[str, Any]) -> torch.Tensor:
    """Train, from the beginning or from a checkpoint."""
    dist.init_process_group("gloo")
    odd = job["fault"].get("name", "") if active.mine else ""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: active.at("step"))
    done = 0
    if job["resume"]:
        if trouble := trouble_with(Path(job["resume"])):
            raise ValueError(f"{job['resume']} {trouble}")
        state = torch.load(job["resume"], weights_only=True)
        net.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    policy = DistributedDataParallel(net)
    goal = objective(clip_high=0.3) if odd == "other-objective" else objective()
    size, losses = 8 if odd == "other-cut" else 4, 1 if odd == "fewer-losses" else None
    with ends_together():
        for step in range(done, STEPS):
            take_step(policy, optimizer, goal, step, size, losses)
            save(Path(job["saves"]), step + 1, policy, optimizer)
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    del policy  # or it is the last that holds the group, and its end may wait for ever for gloo's threads
    dist.destroy_process_group()
    return weights


def checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)
