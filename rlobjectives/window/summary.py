"""What the losses of a window report, merged over its micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlobjectives.component import Metric
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.ending import ends_together
from rlobjectives.distributed.faults import Fault, told_by
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.errors import WindowError
from rlobjectives.statistics import Mean, Stat, Sum
from rlobjectives.statistics.tally import Tally
from rlobjectives.window.parts import WindowParts
from rlobjectives.window.reports import Report

__all__ = ["WINDOW_METRICS", "Added", "ObjectiveOutput", "stand_in", "summarize"]

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
    objective: WindowParts,
    communicator: Communicator,
    counts: Mapping[str, Tensor],
    outputs: Iterable[ObjectiveOutput],
    extra: Mapping[str, Stat],
    *,
    fault: Fault | None = None,
    added: Added | None = None,
) -> Report:
    """See `Window.summarize`.

    Args:
        objective: Declares the metrics.
        communicator: The ranks of the window.
        counts: What the window counted when it was frozen.
        outputs: Of every micro-batch of this rank.
        extra: More statistics to report.
        fault: What went wrong in the losses of this rank.
        added: What the ranks had when the window was frozen, where that is known.
    """
    # A copy: a second call starts where the first did.
    fault = replace(fault, counts=dict(fault.counts)) if fault else Fault(columns=objective.own_columns)
    given: list[ObjectiveOutput] = []
    with fault.guard():
        given += _outputs(outputs)
    if added is not None and fault.error is None:
        _stop_if_some_are_missing(given, added, communicator)
    own: dict[str, type[Stat]] = {**objective.metric_kinds(), _SEEN: Mean}
    device = counts["tokens"].device
    tally = Tally({**{name: type(stat) for name, stat in extra.items()}, **own})
    # Identities travel where anything fails, so that all rows keep one width.
    merged = Tally(tally.kinds).folded(device)
    with fault.guard():
        for position, output in enumerate(given):
            tally.add(output.metrics)
            tally.add({_SEEN: Mean(torch.stack([output.tokens, torch.ones_like(output.tokens)]))})
            for name, found in output.faults.items():
                fault.counts[position, name] = found
        if taken := set(extra) & {*own, *WINDOW_METRICS}:
            raise WindowError(
                f"extra holds {sorted(taken)}, which the objective reports itself. Rename them."
            )
        if communicator.owns_sequences:
            tally.add(extra)
        merged = tally.folded(device)
    outcome = exchange(merged, communicator, fault=fault, micro_batches=len(given))
    result = outcome.statistics
    fewer = _fewer(outcome.counts, added, communicator)
    _check_seen(result.pop(_SEEN), counts["tokens"], fewer, communicator)
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


def stand_in(columns: Mapping[str, object]) -> ObjectiveOutput:
    """What stands for the loss of a micro-batch that could not be computed: 0, attached to its columns.

    Args:
        columns: What a forward gave; those without a gradient are left out.
    """
    given = [one for one in columns.values() if isinstance(one, Tensor)]
    attached = [one for one in given if one.requires_grad]
    dtype = attached[0].dtype if attached else torch.float32
    device = (attached or given or [torch.zeros(())])[0].device  # of the micro-batches that stand beside it
    loss = torch.zeros((), dtype=dtype, device=device, requires_grad=not attached)
    for column in attached:  # the sum of nothing, and not 0 × column, which may hold NaN
        loss = loss + column.flatten()[:0].sum().to(device, dtype)
    return ObjectiveOutput(loss=loss, metrics={}, tokens=torch.zeros((), dtype=torch.float64, device=device))


@dataclass(frozen=True, slots=True)
class Added:
    """What was added to a window.

    Attributes:
        micro_batches: Of each rank, by position in the group.
        tokens: Counted tokens of this rank, 0-d.
    """

    micro_batches: tuple[int, ...]
    tokens: Tensor


def _stop_if_some_are_missing(
    outputs: Sequence[ObjectiveOutput], added: Added, communicator: Communicator
) -> None:
    """Tell the others at once where losses are missing here: they may wait for the backwards that belong to them."""
    if communicator.group is None or len(added.micro_batches) != communicator.world_size:
        return
    mine = added.micro_batches[communicator.rank]
    if len(outputs) >= mine:
        return
    seen = sum(float(one.tokens) for one in outputs)
    if seen != float(added.tokens):  # those left out were not all empty
        with ends_together(communicator):
            raise WindowError(
                f"rank {communicator.global_rank(communicator.rank)} handed over {len(outputs)} of its {mine} "
                f"micro-batches, which saw {seen:,.0f} of its {float(added.tokens):,.0f} tokens. Hand summarize() the "
                "output of every micro-batch once."
            )


def _fewer(losses: Sequence[int], added: Added | None, communicator: Communicator) -> str:
    """Which ranks ran fewer losses than they had micro-batches, in words."""
    if added is None or len(losses) != len(added.micro_batches):
        return ""
    found = [
        f"rank {communicator.global_rank(position)} handed over {here} of its {there} micro-batches"
        for position, (here, there) in enumerate(zip(losses, added.micro_batches, strict=True))
        if here < there
    ]
    return f" ({'; '.join(found)})" if found else ""


def _check_seen(seen: Stat, expected: Tensor, fewer: str, communicator: Communicator) -> None:
    tokens, counted = float(seen.row[0]), float(expected)
    if tokens != counted:
        error = WindowError(
            f"the losses saw {tokens:,.0f} tokens, but the window was frozen with {counted:,.0f}{fewer}, so every "
            "weight is wrong. Hand summarize() the output of every micro-batch once, and change no mask after freeze()."
        )
        raise told_by(error, communicator)
