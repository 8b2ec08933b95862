"""A policy of a few hundred weights, rollouts made from tables, and the plain loop they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.functional import pad

from rlobjectives import GDPO, KLPenalty, Objective, PaddedLayout, Rollouts, TokenBatch, TokenMean
from rlobjectives.integrations.lightning import Experience, ObjectiveMixin

VOCABULARY, WIDTH = 7, 6
LEARNING_RATE = 16.0  # makes the update as large as the weights, whose rounding would hide its error
# Completions of each prompt, by rank. Rank 1 has one micro-batch of two where rank 0 has five.
GROUPS = ((3, 2, 4), (2,))


def objective() -> Objective:
    """Everything that reads the window: whitening over it, token counts, a reference policy."""
    return Objective(estimator=GDPO(weights=(1.0, 0.5)), reduction=TokenMean(), kl=KLPenalty(coef=0.1))


def experience(groups: tuple[int, ...], seed: int, *, masked: bool = False) -> Experience:
    """Made-up rollouts of some prompts, ragged, with a fully masked sequence among them."""
    generator = torch.Generator().manual_seed(seed)
    count, width = sum(groups), 6
    ids = torch.randint(0, VOCABULARY, (count, width), generator=generator)
    lengths = torch.randint(2, width + 1, (count,), generator=generator)
    real = torch.arange(width) < lengths[:, None]
    mask = real & (torch.arange(width) >= 1)
    if count > 2:
        mask[1] = False
    if masked:
        mask[:] = False
    logprobs = -torch.rand(count, width, generator=generator) - 1.0
    rewards = torch.randint(0, 3, (count, 2), generator=generator).double()
    group_ids = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups, dtype=torch.long))
    return Experience(
        input_ids=ids,
        attention_mask=real,
        layout=PaddedLayout(mask),
        rollouts=Rollouts(rewards=rewards, group_ids=group_ids),
        ref_logprobs=logprobs,
    )


def joined(parts: list[Experience]) -> Experience:
    """The rollouts of all ranks as one process would hold them."""
    offsets = torch.tensor([0, *(part.need_rollouts().groups.count for part in parts)]).cumsum(0)
    return Experience(
        input_ids=torch.cat([part.input_ids for part in parts]),
        attention_mask=torch.cat([part.attention_mask for part in parts]),
        layout=PaddedLayout(torch.cat([part.layout.mask for part in parts])),
        rollouts=Rollouts(
            rewards=torch.cat([part.need_rollouts().rewards for part in parts]),
            group_ids=torch.cat(
                [
                    part.need_rollouts().group_ids + offset
                    for part, offset in zip(parts, offsets[:-1], strict=True)
                ]
            ),
            truncated=_together([part.need_rollouts().truncated for part in parts]),
        ),
        ref_logprobs=torch.cat([part.ref_logprobs for part in parts if part.ref_logprobs is not None]),
    )


def _together(columns: list[Tensor | None]) -> Tensor | None:
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known else None


class Net(nn.Module):
    """Next-token scores from the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids))))

    def logprobs(self, ids: Tensor) -> Tensor:
        """Log-probability of each token given the one before; 0 at position 0."""
        scores = self(ids[:, :-1]).float().log_softmax(-1)
        return pad(scores.gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0))


class ToyPolicy(ObjectiveMixin, LightningModule):
    """Trains `Net` on the experience that `source` makes for (rank, rollout)."""

    def __init__(self, source: Any, *, adam: bool = False, **options: Any) -> None:
        super().__init__(**{"objective": objective(), "micro_batch_size": 2, **options})
        self.source = source
        self.adam = adam
        self.net = Net()
        self.backwards = 0
        self.trace: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            for part in (self.net.embedding, self.net.hidden, self.net.head, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        if not self.adam:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]

    def rollout(self, batch: Tensor) -> Experience:
        return self.source(self.global_rank if self.trainer.world_size > 1 else None, int(batch))

    def score(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None]:
        return self.net.logprobs(micro_batch.input_ids), None

    def on_after_backward(self) -> None:
        self.backwards += 1

    def on_train_batch_end(self, *_: Any) -> None:
        schedulers = [config.scheduler.last_epoch for config in self.trainer.lr_scheduler_configs]
        self.trace.append(
            {
                "weights": full_weights(self),
                "optimizer": optimizer_state(self),
                "scheduler": schedulers,
                "steps": self.trainer.global_step,
                "metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            }
        )


def full_weights(module: nn.Module) -> Tensor:
    """All weights in one vector, gathered from wherever they are sharded."""
    parameters = list(module.parameters())
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return torch.cat([p.detach().clone().flatten() for p in parameters])
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return torch.cat([p.detach().clone().flatten() for p in full])


def optimizer_state(module: LightningModule) -> Tensor:
    """This rank's optimizer state as one vector."""
    optimizer: Any = module.optimizers().optimizer
    while hasattr(optimizer, "optimizer"):  # ZeRO wraps the client's
        optimizer = optimizer.optimizer
    numbers = [torch.zeros(0)]
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            numbers.append(torch.as_tensor(local, dtype=torch.float32).flatten())
    return torch.cat(numbers)


def plain_update(data: Experience, *, clip: float | None = None) -> tuple[Tensor, float]:
    """One SGD step in plain PyTorch: one process, one batch, no trainer. Returns the weights and the gradient norm."""
    net, goal = Net(), objective()
    estimate = goal.estimator.estimate(data.need_rollouts())
    window = goal.freeze([(estimate, data.layout)])
    tokens = TokenBatch(
        logprobs=net.logprobs(data.input_ids),
        layout=data.layout,
        advantages=window.advantages(estimate, data.layout),
        ref_logprobs=data.ref_logprobs,
    )
    window.loss(tokens).loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), float("inf") if clip is None else clip)
    torch.optim.SGD(net.parameters(), lr=LEARNING_RATE).step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), float(norm)


def initial_weights() -> Tensor:
    """What every run starts from."""
    return torch.cat([p.detach().flatten() for p in Net().parameters()])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference of two updates, relative to the largest weight change."""
    change = (expected - initial_weights()).abs().max()
    return float((found - expected).abs().max() / change)


def batches(count: int) -> Iterator[Tensor]:
    """A loader that only counts."""
    yield from torch.arange(count)
