"""What the losses of a window report, merged over its micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.component import Metric
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.synchronize import Fault, exchange
from rlobjectives.errors import WindowError
from rlobjectives.statistics import Mean, Stat, Sum, fold
from rlobjectives.window.micro_batches import collect
from rlobjectives.window.reports import Report

if TYPE_CHECKING:
    from rlobjectives.objective import Objective

__all__ = ["WINDOW_METRICS", "ObjectiveOutput", "summarize"]

WINDOW_METRICS = {
    "window/tokens": Metric(Sum, "tokens", "tokens that counted"),
    "window/sequences": Metric(
        Sum, "sequences", "sequences that counted, also those without a counted token"
    ),
}
"""What every summary starts with."""
_SEEN = "window/seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """What one micro-batch gives.

    Attributes:
        loss: 0-d; this micro-batch's share of the window's loss. Multiply by the gradient scale and call
            ``backward`` once.
        metrics: Statistics of this micro-batch, merged by `Window.summarize`.
        tokens: How many of its tokens counted, 0-d.
        faults: Non-finite and counted entries of each column that was read; `Window.summarize` raises on
            them.
    """

    loss: Tensor
    metrics: dict[str, Stat]
    tokens: Tensor
    faults: dict[str, tuple[Tensor, Tensor]] = field(repr=False, default_factory=dict)


def summarize(
    objective: Objective,
    communicator: Communicator,
    counts: Mapping[str, Tensor],
    outputs: Iterable[ObjectiveOutput],
    extra: Mapping[str, Stat],
) -> Report:
    """See `Window.summarize`.

    Args:
        objective: Declares the metrics.
        communicator: The ranks of the window.
        counts: What the window counted when it was frozen.
        outputs: Of every micro-batch of this rank.
        extra: More statistics to report.
    """
    fault = Fault()
    collected: dict[str, list[Stat]] = {name: [] for name in objective.metric_kinds()}
    kinds = dict(objective.metric_kinds())
    collected[_SEEN], kinds[_SEEN] = [], Mean
    device = counts["tokens"].device
    with fault.guard():
        for position, output in enumerate(_outputs(outputs)):
            collect(collected, kinds, output.metrics)
            collected[_SEEN].append(Mean(torch.stack([output.tokens, torch.ones_like(output.tokens)])))
            for name, found in output.faults.items():
                fault.counts[position, name] = found
        if taken := set(extra) & {*collected, *WINDOW_METRICS}:
            raise WindowError(
                f"extra holds {sorted(taken)}, which the objective reports itself. Rename them."
            )
    for name, stat in extra.items():
        collected[name], kinds[name] = [stat] * communicator.owns_sequences, type(stat)
    merged = {name: fold(kind, collected[name], device) for name, kind in kinds.items()}
    result = exchange(merged, communicator, fault=fault).statistics
    _check_seen(result.pop(_SEEN), counts["tokens"])
    labels = [*WINDOW_METRICS]
    numbers = [counts["tokens"], counts["sequences"]]
    measured = [torch.ones_like(number, dtype=torch.bool) for number in numbers]
    weights = [torch.full_like(number, torch.nan) for number in numbers]
    for name, stat in result.items():
        report = stat.report(name)
        labels += report
        numbers += report.values()
        measured += [stat.measured] * len(report)
        weights += [stat.weight] * len(report)
    table = [torch.stack([one.to(device).double() for one in row]) for row in (numbers, measured, weights)]
    rows = zip(labels, *torch.stack(table).tolist(), strict=True)
    kept = [(label, value, weight) for label, value, here, weight in rows if here]
    return Report(
        {label: value for label, value, _ in kept},
        {label: weight for label, _, weight in kept if not math.isnan(weight)},
    )


def _outputs(outputs: object) -> Iterator[ObjectiveOutput]:
    """The outputs one by one, if that is what they are."""
    if isinstance(outputs, ObjectiveOutput) or not isinstance(outputs, Iterable):
        raise WindowError(
            f"outputs is {type(outputs).__name__}; expected a list of what window.loss returned for each micro-batch."
        )
    for position, output in enumerate(outputs):
        if not isinstance(output, ObjectiveOutput):
            raise WindowError(
                f"outputs[{position}] is {type(output).__name__}; expected what window.loss returned, an "
                "ObjectiveOutput, for each micro-batch (not its .loss)."
            )
        yield output


def _check_seen(seen: Stat, expected: Tensor) -> None:
    tokens, counted = float(seen.row[0]), float(expected)
    if tokens != counted:
        raise WindowError(
            f"the losses saw {tokens:,.0f} tokens, but the window was frozen with {counted:,.0f}, so every weight "
            "is wrong. Hand summarize() the output of every micro-batch once, and change no mask after freeze()."
        )
