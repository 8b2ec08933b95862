"""On two ranks: train the toy policy on stale rollouts, with a pass over each window before its losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlobjectives import GRPO, M2PO, P3O, ImportanceCorrection, Objective, TokenBatch
from rlobjectives.integrations.lightning import Experience
from rlobjectives.layouts import PaddedLayout
from tests.integrations.lightning.runs import run
from tests.integrations.lightning.toy import GROUPS, LEARNING_RATE, Net, experience

BUDGET = 0.05
OBJECTIVES = {
    "p3o": Objective(estimator=GRPO(), policy_loss=P3O()),
    "p3o_old": Objective(estimator=GRPO(), policy_loss=P3O()),
    "m2po": Objective(
        estimator=GRPO(),
        policy_loss=M2PO(budget=BUDGET, mode="clip_waterfill", floor_low=0.0, floor_high=0.0),
    ),
    "corrected": Objective(
        estimator=GRPO(),
        correction=ImportanceCorrection(low=0.5, high=2.0, outside="mask", denominator="kept"),
    ),
}
BRINGS_OLD = ("m2po", "p3o_old")
"""Their rollouts come with log-probabilities of other weights, so that even the first window needs a forward."""
WINDOWS = 2


def stale(name: str, rank: int) -> Experience:
    """Rollouts of a policy that is not the current one; for some it also stands in for the old policy."""
    found = experience(GROUPS[rank], seed=10 * rank)
    noise = torch.randn(found.input_ids.shape, generator=torch.Generator().manual_seed(50 + rank))
    behavior = Net().logprobs(found.input_ids).detach() + 0.5 * noise
    old = {"old_logprobs": behavior} if name in BRINGS_OLD else {}
    return found.replace(behavior_logprobs=behavior, ref_logprobs=None, **old)


class Source:
    """The rollout hook's data, in a form that travels to other processes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int | None, rollout: int) -> Experience:
        del rollout
        return stale(self.name, rank or 0)


def train(strategies: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """One update, and two windows of one rollout, under each strategy."""
    return {
        strategy: {
            f"{name}/{windows}": run(
                strategy, Source(name), objective=OBJECTIVES[name], windows_per_rollout=windows
            )["trace"][-1]
            for name in OBJECTIVES
            for windows in (1, WINDOWS)
        }
        for strategy in strategies
    }


def plain_updates(name: str, windows: int) -> Tensor:
    """The same in plain PyTorch: one process, each window in one batch."""
    net, goal = Net(), OBJECTIVES[name]
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    parts = [stale(name, rank) for rank in (0, 1)]
    estimates = [goal.estimator.estimate(part.need_rollouts()) for part in parts]
    start = [net.logprobs(part.input_ids).detach() for part in parts]
    for window in range(windows):
        rows = [_rows(part, window, windows) for part in parts]
        update(net, goal, parts, estimates, start, rows)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def _rows(part: Experience, window: int, windows: int) -> list[int]:
    ids = part.need_rollouts().group_ids.tolist()
    groups = list(dict.fromkeys(ids))
    chosen = groups[len(groups) * window // windows : len(groups) * (window + 1) // windows]
    return [row for row, group in enumerate(ids) if group in chosen]


def update(
    net: nn.Module,
    goal: Objective,
    parts: list[Experience],
    estimates: list[Tensor],
    start: list[Tensor],
    rows: list[list[int]],
) -> None:
    """Gradient of one window over the chosen rows of both ranks."""

    def chosen(columns: list[Any]) -> Tensor:
        return torch.cat([column[index] for column, index in zip(columns, rows, strict=True)])

    layout = PaddedLayout(chosen([part.layout.mask for part in parts]))
    estimate = chosen(estimates)
    old = [part.old_logprobs for part in parts]
    tokens = TokenBatch(
        logprobs=net.logprobs(chosen([part.input_ids for part in parts])),
        layout=layout,
        behavior_logprobs=chosen([part.behavior_logprobs for part in parts]),
        old_logprobs=chosen(start if old[0] is None else old),
    )
    builder = goal.window()
    builder.add(estimate=estimate, layout=layout)
    builder.add_prepass(tokens.detach())
    window = builder.freeze()
    advantages = window.advantages(estimate, layout)
    window.loss(tokens.replace(advantages=advantages)).loss.backward()
