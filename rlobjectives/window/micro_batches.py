"""What the builder, the window and the summary ask of one micro-batch."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rlobjectives.checks import check_tensor, logprob_excess, nonfinite_count, suggestion
from rlobjectives.columns import LOGPROBS
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.faults import ABOVE
from rlobjectives.errors import CapabilityError, MissingColumnError, ShapeError
from rlobjectives.estimators.base import Estimator
from rlobjectives.estimators.function import FunctionEstimator
from rlobjectives.estimators.weights import RewardWeights
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout
from rlobjectives.masking import count, select
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat, Sum
from rlobjectives.tokens import TokenBatch
from rlobjectives.window.parts import WindowParts

COUNTS = ("tokens", "sequences", "nonempty_sequences")
"""What a window counts; the statistics are named ``window/…``."""


def check_estimate(estimator: Estimator, estimate: Tensor, layout: TokenLayout) -> None:
    """Refuse an estimate that has not one row per sequence, or one entry per token, with the estimator's columns."""
    name = f"{type(estimator).__name__} estimate"
    check_tensor(name, estimate)
    check_layout(layout)
    columns, count = estimator.columns, layout.num_sequences
    if estimator.token_level:
        layout.check_columns(name, estimate)
        found = estimate.shape[len(layout.shape) :]
        if found and found[0] != columns and columns > 1:
            raise ShapeError(
                f"{name} has shape {list(estimate.shape)}; expected {[*layout.shape, columns]}. Pass what "
                "estimate(rollouts) gave, with all of its columns."
            )
        return
    # An estimator that does not say how many columns it has may have any number, for its own finalize.
    told = type(estimator).columns is not Estimator.columns or bool(estimator.estimate_columns)
    expected = (
        f"[{count}, {columns}]" if columns > 1 else f"[{count}]" + ("" if told else f" or [{count}, k]")
    )
    shapes = ((count, columns),) if columns > 1 else ((count,),)
    free = not told and estimate.dim() == 2 and estimate.shape[0] == count and estimate.shape[1] > 1
    if tuple(estimate.shape) not in shapes and not free:
        raise ShapeError(
            f"{name} has shape {list(estimate.shape)}; expected {expected}, one row per sequence of the layout. Pass what "
            "estimate(rollouts) gave, all of its columns, as estimate[rows] with the layout of the same rows."
        )


def check_read(extra: Collection[str], reads: Collection[str], objective: str) -> None:
    """Refuse a user's own columns that nothing reads: one was misspelt, or a part does not declare it."""
    for name in extra:
        if name not in reads:
            raise MissingColumnError(
                f"Nothing in {objective} reads the column {name!r} in extra.{suggestion(name, reads)} Declare it in the reads "
                "of the part that does, or leave it out."
            )


def check_rollouts_read(objective: WindowParts, rollouts: Rollouts) -> None:
    """Refuse rewards at tokens, and columns of a user's own, that the estimator does not read and would lose."""
    estimator, reads = objective.estimator, objective.estimator_reads()
    if isinstance(estimator, FunctionEstimator) and not reads:
        return  # a function may read anything
    check_read(rollouts.extra, reads, objective.name)
    declares = bool(reads) or isinstance(
        estimator, RewardWeights
    )  # a part of the version before declares nothing
    if rollouts.token_rewards is not None and "token_rewards" not in reads and declares:
        raise CapabilityError(
            f"{type(estimator).__name__} does not read token_rewards, so they would be lost. Choose an estimator that credits "
            "rewards at tokens (GAE, ReinforcePlusPlus), or leave them out."
        )


def own_part(layout: TokenLayout, communicator: Communicator) -> TokenLayout:
    """The layout as this rank may count it."""
    # Under context parallelism nobody may take the tokens at hand for the whole sequence, and one rank counts it.
    if communicator.context_group is None:
        return layout
    if not communicator.owns_sequences:
        layout = layout.with_facts(sequence_mask=torch.zeros_like(layout.sequence_mask()))
    return layout.as_shard()


def count_statistics(layout: TokenLayout) -> dict[str, Stat]:
    """The counts that every window knows."""
    counted = layout.sequence_mask()
    return {
        "window/tokens": Sum.of(layout.mask),
        "window/sequences": Sum.of(counted),
        "window/nonempty_sequences": Sum.of(counted & (layout.token_counts() > 0)),
    }


def readable(objective: WindowParts, tokens: TokenBatch, name: str) -> Tensor:
    """Tokens, or sequences, at which a column must be finite."""
    # Every counted one, except where a part handles unknown values.
    one = objective.reads().get(name)
    if one is not None and one.column.per == "sequence":
        return tokens.layout.sequence_mask()
    known = tokens.known(name) if one is not None and one.unknown else None
    return tokens.layout.mask if known is None else tokens.layout.mask & known


def column_faults(
    name: str, column: Tensor, mask: Tensor, total: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """How many entries of a column under the mask may not be, and how many there are, by the field of a `Fault`.

    A log-probability may be neither infinite nor above 0.

    Args:
        name: Of the column.
        column: Shaped like the mask.
        mask: Which entries count.
        total: How many those are, where that is known.
    """
    total = count(mask) if total is None else total
    if name not in LOGPROBS:
        return {name: (nonfinite_count(column.detach(), mask), total)}
    # One operation more than the look for finite ones: what is neither is told apart by a sum.
    rest = select(logprob_excess(column.detach()), mask)
    bad, finite = count(rest), rest.sum().isfinite()
    return {name: (bad * ~finite, total), f"{name}{ABOVE}": (bad * finite, total)}
