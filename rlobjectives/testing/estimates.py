"""Laws about estimators and reductions: exact zeros, offsets, and what the weights of tokens add up to."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlobjectives.testing.compare import require
from rlobjectives.testing.examples import Example
from rlobjectives.testing.simulate import whole
from rlobjectives.testing.subject import Subject, open_window

__all__ = ["equal_rewards", "offset", "weights"]

_CONSTANTS = (0.1, 0.2, 0.3, 0.35, 0.7, 0.95, -1e4, 1e-8)


def equal_rewards(subject: Subject, example: Example) -> None:
    """A prompt whose answers all have the same reward has advantages of exactly zero."""
    for constant in _CONSTANTS[example.seed % 2 :: 2]:
        _equal(subject, example, constant)


def _equal(subject: Subject, example: Example, constant: float) -> None:
    objective, case = subject.fresh(), example.draw().with_tokens()
    flat = case.group_ids == case.group_ids.max()
    rewards = torch.zeros_like(case.rewards)
    rewards[(~flat).nonzero()[0]] = 1.0  # one answer to the other prompt stands out
    rewards[flat] = constant
    quiet = torch.zeros_like(case.columns["token_rewards"])
    case = replace(case, rewards=rewards).replaced(token_rewards=quiet).without(subject.refused)
    advantages = whole(objective, case).advantages
    found = (
        f"all rewards of a prompt are {constant}, and its advantages {advantages[flat].flatten().tolist()}"
    )
    require(not bool(advantages[flat].any()), found)
    require(bool(advantages[~flat].any()), "the advantages of a prompt with different rewards are 0")
    if not objective.estimator.token_level:
        signal = objective.estimator.carries_signal(case.rollouts()).tolist()
        require(signal == [True, False], f"carries_signal is {signal} for a live group and a constant one")


def offset(subject: Subject, example: Example) -> None:
    """The same number added to every reward changes no advantage, and costs no precision."""
    case, objective = subject.draw(example), subject.fresh()
    small = replace(case, rewards=1e-3 * case.rewards.abs())
    near, far = (
        whole(objective, one).advantages for one in (small, replace(small, rewards=1e4 + small.rewards))
    )
    off, size = float((far - near).abs().max()), float(near.abs().max())
    require(off <= 1e-7 * size, f"1e4 on top of every reward moves advantages of {size:g} by {off:g}")


def weights(subject: Subject, example: Example) -> None:
    """Every token that counts weighs something, no other does; those of a mean add up to one."""
    case, reduction = subject.draw(example), subject.fresh().reduction
    shard = replace(example.shard, garbage=None)
    window, _, tokens = open_window(subject.fresh(), case, shard)
    found, mask = window.weights(tokens.layout), tokens.layout.mask
    require(not bool(found[~mask].any()), "a token that does not count has a weight")
    require(bool((found[mask] > 0).all()), "a token that counts has no weight")
    if reduction.averages:
        window, _, tokens = open_window(subject.fresh(), case.with_tokens(), shard)
        total = float(window.weights(tokens.layout).sum())
        require(abs(total - 1.0) <= 1e-13, f"the weights of a mean add up to {total}")
