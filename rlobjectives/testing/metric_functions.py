"""Laws about metric functions: statistics of rollouts, the same however the prompts are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat, measured_values
from rlobjectives.testing.cases import GARBAGE, Case, Shard
from rlobjectives.testing.compare import require
from rlobjectives.testing.examples import Example
from rlobjectives.testing.forbidden import no_host_sync
from rlobjectives.testing.subject import Subject

__all__ = ["cut", "dropped", "forms", "masked", "no_wait"]

MetricFunction = Callable[[Rollouts], Mapping[str, Stat]]


def _metric(subject: Subject) -> MetricFunction:
    assert subject.metric is not None
    return subject.metric


def _require_same(found: Mapping[str, Stat], expected: Mapping[str, Stat], where: str) -> None:
    numbers, others = measured_values(expected), measured_values(found)
    odd = sorted(numbers.keys() ^ others.keys())
    require(not odd, f"{where}: only one of both reports {', '.join(odd)}")
    for name, number in numbers.items():
        close = abs(others[name] - number) <= 1e-12 * max(1.0, abs(number))
        require(close, f"{where}: {name} is {others[name]} instead of {number}")


def cut(subject: Subject, example: Example) -> None:
    """Folded over ranks that hold some prompts each, or none, it is that of all prompts together."""
    metric, case = _metric(subject), example.draw()
    expected = metric(case.rollouts())
    ids = case.group_ids.unique()
    shares = [torch.isin(case.group_ids, ids[rank::2]).nonzero().flatten() for rank in range(2)]
    found: dict[str, Stat] = {}
    for rows in (*shares, torch.zeros(0, dtype=torch.long)):
        part = metric(case.rollouts(rows))
        same = {name: type(stat) for name, stat in part.items()} == {
            name: type(stat) for name, stat in expected.items()
        }
        require(same, f"{len(rows)} sequences give {sorted(part)}, and all of them {sorted(expected)}")
        found = {name: stat.merge(found[name]) if name in found else stat for name, stat in part.items()}
    _require_same(found, expected, "cut over ranks")


def forms(subject: Subject, example: Example) -> None:
    """Packed, with more padding, or in another order, the numbers are the same."""
    metric, case = _metric(subject), example.draw()
    expected = metric(case.rollouts())
    for shard in (Shard(packed=True), Shard(extra=2)):
        _require_same(metric(case.rollouts(shard=shard)), expected, f"laid out as {shard}")
    order: Tensor = torch.randperm(case.count, generator=torch.Generator().manual_seed(example.seed))
    _require_same(metric(case.permuted(order).rollouts()), expected, "in another order")


def masked(subject: Subject, example: Example) -> None:
    """Whatever stands at masked tokens and in cells without a score."""
    metric, case = _metric(subject), example.draw()
    expected = metric(case.rollouts())
    for garbage in GARBAGE:
        dirty: Case = replace(case, rewards=torch.where(case.scored, case.rewards, garbage))
        found = metric(dirty.rollouts(shard=Shard(garbage=garbage)))
        _require_same(found, expected, f"{garbage} where nothing counts")


def dropped(subject: Subject, example: Example) -> None:
    """Beside rollouts that never had the dropped sequences."""
    metric, case = _metric(subject), example.draw()
    without = case.permuted(case.counted.nonzero().flatten())
    _require_same(metric(case.rollouts()), metric(without.rollouts()), "with dropped sequences")


def no_wait(subject: Subject, example: Example) -> None:
    """No look at the device."""
    metric, rollouts = _metric(subject), example.draw().rollouts()
    with no_host_sync():
        metric(rollouts)
