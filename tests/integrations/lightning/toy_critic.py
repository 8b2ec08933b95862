"""The toy policy with a critic, runs of it on any strategy, and the plain loop they are compared with."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlobjectives import (
    GAE,
    ClippedSurrogate,
    ClippedValueLoss,
    KLPenalty,
    Objective,
    PaddedLayout,
    Rollouts,
    TokenBatch,
    TokenMean,
)
from rlobjectives.integrations.lightning import CriticMixin, Experience
from tests.integrations.lightning.runs import fit, uneven
from tests.integrations.lightning.toy import (
    LEARNING_RATE,
    VOCABULARY,
    Net,
    ToyPolicy,
    full_weights,
    initial_weights,
)

CRITIC_LEARNING_RATE = 8.0


def objective(**options: Any) -> Objective:
    """PPO with everything that reads the window: whitening over its tokens, token counts, a reference policy."""
    given: dict[str, Any] = {
        "estimator": GAE(
            discount=0.9, trace_decay=0.8, on_lost_reward="drop", normalize="window", epsilon=0.1
        ),
        "policy_loss": ClippedSurrogate(),
        "reduction": TokenMean(),
        "kl": KLPenalty(coef=0.1),
        "value_loss": ClippedValueLoss(coef=0.5, clip=0.1),
    }
    return Objective(**{**given, **options})


class CriticNet(nn.Module):
    """Values from the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.head = nn.Linear(VOCABULARY, 1)
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return pad(self.head(torch.tanh(self.body(ids[:, :-1]))).squeeze(-1), (1, 0))


class ToyAgent(CriticMixin, ToyPolicy):
    """`ToyPolicy` with a critic of its own; the last rollout's experience is kept as `seen`."""

    def __init__(self, *, critic_learning_rate: float = 0.02, **options: Any) -> None:
        super().__init__(**{"source": uneven, "objective": objective(), **options})
        self.critic = CriticNet()
        self.critic_learning_rate = critic_learning_rate
        self.policy_runs = 0

    def configure_model(self) -> None:
        super().configure_model()
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for part in (self.critic.body, self.critic.head, self.critic):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        policy = {"params": list(self.net.parameters()), "name": "policy"}
        critic = {"params": list(self.critic.parameters()), "name": "critic"}
        if not self.adam:
            groups = [{**policy, "lr": LEARNING_RATE}, {**critic, "lr": CRITIC_LEARNING_RATE}]
            return torch.optim.SGD(groups)
        groups = [{**policy, "lr": 0.05}, {**critic, "lr": self.critic_learning_rate}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]

    def score(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None]:
        self.policy_runs += torch.is_grad_enabled()
        return super().score(micro_batch)

    def score_values(self, micro_batch: Experience) -> Tensor:
        return self.critic(micro_batch.input_ids)

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def watched_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.head.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.trace[-1].update(
            policy=full_weights(self.net),
            critic=full_weights(self.critic),
            policy_state=group_state(self, "policy"),
            critic_state=group_state(self, "critic"),
        )


def group_state(module: Any, name: str) -> Tensor:
    """This rank's optimizer state of one parameter group, as one vector."""
    wrapper: Any = module.optimizers().optimizer
    inner = wrapper
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    place = [group["name"] for group in inner.param_groups].index(name)
    if hasattr(wrapper, "sub_group_to_group_id"):  # ZeRO-3
        held = [
            flat
            for number, flat in enumerate(wrapper.fp32_partitioned_groups_flat)
            if wrapper.sub_group_to_group_id[number] == place
        ]
    elif hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO-1 and ZeRO-2
        held = [wrapper.single_partition_of_fp32_groups[place]]
    else:
        held = inner.param_groups[place]["params"]
    numbers = [torch.zeros(0)]
    for parameter in held:
        for value in inner.state.get(parameter, {}).values():
            local = value.to_local() if hasattr(value, "to_local") else value
            numbers.append(torch.as_tensor(local, dtype=torch.float32).flatten())
    return torch.cat(numbers)


def cut_off(rank: int | None, rollout: int) -> Experience:
    """As `uneven`, with every second sequence cut off at its length, whatever that is."""
    data = uneven(rank, rollout)
    truncated = torch.arange(len(data)) % 2 == 0
    return data.replace(rollouts=dataclasses.replace(data.need_rollouts(), truncated=truncated))


def last_values(critic: CriticNet, data: Experience) -> Tensor:
    """Values of the states after the last real token of each sequence, one by one."""
    found = []
    for ids, real in zip(data.input_ids, data.attention_mask, strict=True):
        last = int(ids[int(real.sum()) - 1])
        found.append(critic(torch.tensor([[last, 0]]))[0, 1])
    return torch.stack(found)


def plain_agent_update(data: Experience) -> dict[str, Tensor]:
    """One SGD step of policy and critic in plain PyTorch: one process, one batch, no trainer."""
    net, critic, goal = Net(), CriticNet(), objective()
    values = critic(data.input_ids)
    given = data.need_rollouts()
    beyond = {}
    if given.truncated is not None:
        beyond = {"truncated": given.truncated, "bootstrap_values": last_values(critic, data).detach()}
    rollouts = Rollouts(
        rewards=given.rewards,
        group_ids=given.group_ids,
        layout=data.layout,
        values=values.detach(),
        **beyond,
    )
    estimate = goal.estimator.estimate(rollouts)
    returns = goal.estimator.value_targets(rollouts)
    window = goal.freeze([(estimate, data.layout)])
    tokens = TokenBatch(
        logprobs=net.logprobs(data.input_ids),
        layout=data.layout,
        advantages=window.advantages(estimate, data.layout),
        ref_logprobs=data.ref_logprobs,
        values=values,
        old_values=values,
        returns=returns,
    )
    window.loss(tokens).loss.backward()
    groups = [
        {"params": net.parameters(), "lr": LEARNING_RATE},
        {"params": critic.parameters(), "lr": CRITIC_LEARNING_RATE},
    ]
    torch.optim.SGD(groups).step()
    mask = data.layout.mask
    error = (returns - values.detach())[mask].double()
    explained = 1.0 - error.var() / returns[mask].double().var()
    return {"policy": full_weights(net), "critic": full_weights(critic), "explained": explained}


def initial_agent() -> dict[str, Tensor]:
    """What every run starts from."""
    return {"policy": initial_weights(), "critic": full_weights(CriticNet())}


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


ALONE = {"adam": True, "critic_warmup_steps": 3, "critic_epochs": 1}
"""The critic alone for the first rollout (two steps) and half of the second; then both, and the critic once more."""


def train(strategy: str, rollouts: int, *, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    """Train and give the trace, with the warnings that were raised."""
    agent = ToyAgent(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(agent, strategy, rollouts=rollouts, **(trainer or {}))
    told = [str(one.message) for one in caught if "value head" in str(one.message)]
    return {"trace": agent.trace, "told": told, "policy_runs": agent.policy_runs}


def all_cases(strategies: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    """Every case of every strategy, in one set of processes."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        found[strategy] = cases = {
            "first": train(strategy, 1),
            "more for the critic": train(strategy, 1, critic_epochs=1),
            "cut off": train(strategy, 1, source=cut_off, bootstrap_truncated=True),
        }
        if strategy == "zero2":
            continue
        place = Path(folder) / strategy
        cases["whole"] = train(strategy, 4, source=sampled, seed=3, **ALONE)
        train(strategy, 4, source=sampled, seed=3, **ALONE, trainer={"max_steps": 4, "folder": place})
        torch.manual_seed(99)  # a resumed process does not stand where the stopped one stood
        cases["rest"] = train(strategy, 4, source=sampled, **ALONE, trainer={"resume": place / "step=4.ckpt"})
        unpaid = objective(value_loss=ClippedValueLoss(coef=0.0))
        cases["decayed"] = train(strategy, 3, objective=unpaid, **ALONE)
        cases["still"] = train(strategy, 3, critic_learning_rate=0.0, **ALONE)
    return found
