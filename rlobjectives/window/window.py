"""A frozen window: advantages, weights and losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.estimators.advantage_metrics import advantage_metrics
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import TokenLoss
from rlobjectives.losses.weighted_sum import weighted_sum
from rlobjectives.statistics import Mean, Stat, Sum
from rlobjectives.tokens import TokenBatch
from rlobjectives.window.micro_batches import COUNTS, bad_entries, check_estimate, own_part, readable
from rlobjectives.window.reports import Report
from rlobjectives.window.summary import ObjectiveOutput, summarize

if TYPE_CHECKING:
    from rlobjectives.objective import Objective

__all__ = ["Window"]


class Window:
    """One optimizer step with everything known about it. Immutable; made by `WindowBuilder.freeze`.

    Args:
        objective: The parts.
        communicator: The ranks.
        statistics: Merged statistics, by part and name.
        micro_batches: Largest number on any rank.

    Attributes:
        objective: The parts.
        communicator: The ranks.
        micro_batches: Largest number of micro-batches on any rank: pad the others with dummies up to it.
        empty: No token counts anywhere; the same on all ranks. Skip backward, optimizer and scheduler.
    """

    def __init__(
        self,
        objective: Objective,
        communicator: Communicator,
        statistics: Mapping[str, Stat],
        micro_batches: int,
    ) -> None:
        self.objective = objective
        self.communicator = communicator
        self.micro_batches = micro_batches
        self._statistics = dict(statistics)
        self._counts = {
            name: statistics[f"window/{name}"].row[0]
            if f"window/{name}" in statistics
            else torch.full((), torch.nan, dtype=torch.float64)
            for name in COUNTS
        }
        self._empty: bool | None = None

    @property
    def empty(self) -> bool:
        """Whether no token counts on any rank."""
        if self._empty is None:
            self._empty = not bool(self._counts["tokens"] > 0)
        return self._empty

    def context(self, scope: str, turn: int = 0) -> WindowContext:
        """What the part in ``scope`` (``"estimator"``, ``"policy_loss"`` …) may know of the window."""
        prefix = f"{scope}/"
        own = {
            name.removeprefix(prefix): stat
            for name, stat in self._statistics.items()
            if name.startswith(prefix)
        }
        counts = self._counts
        if scope == "kept":  # the window without the tokens that corrections drop
            counts = {name: own.pop(f"window/{name}").row[0] for name in COUNTS}
        return WindowContext(
            tokens=counts["tokens"],
            sequences=counts["sequences"],
            nonempty_sequences=counts["nonempty_sequences"],
            statistics=own,
            context_sum=self.communicator.context_sum,
            round=turn,
        )

    def advantages(self, estimate: Tensor, layout: TokenLayout) -> Tensor:
        """Final advantages of a micro-batch's tokens.

        Args:
            estimate: Its rows of the estimate, as given to `WindowBuilder.add`.
            layout: Its layout.

        Returns:
            Float64, shaped like the mask, 0 where the mask is false. Without gradient.
        """
        estimator = self.objective.estimator
        check_estimate(estimator, estimate, layout)
        final = estimator.finalize(estimate.detach(), layout, self.context("estimator"))
        if not estimator.token_level and final.dim() == 1:
            final = layout.expand(final)
        layout.check(f"{type(estimator).__name__}.finalize", final)
        return layout.select(final)

    def weights(self, layout: TokenLayout) -> Tensor:
        """Weight of each token in the window's loss: float64, shaped like the mask, 0 where it is false."""
        return self._weights(layout, "reduction")

    def _weights(self, layout: TokenLayout, scope: str) -> Tensor:
        layout = own_part(layout, self.communicator)
        weights = self.objective.reduction.weights(layout, self.context(scope))
        weights = weights.to(layout.device)  # a rank that had no micro-batch does not know where they lie
        if not self.objective.reduction.token_level:
            weights = layout.expand(weights)
        layout.check(f"{type(self.objective.reduction).__name__}.weights", weights)
        return layout.select(weights)

    def loss(self, tokens: TokenBatch) -> ObjectiveOutput:
        """This micro-batch's share of the window's loss, with metrics. No communication, no host sync.

        Args:
            tokens: Columns of one micro-batch; a dummy with a mask that is false everywhere gives an exact
                zero that is attached to the graph.

        Returns:
            Loss (0-d, in the log-probabilities' precision, float32 at least) and metrics. Gradient flows to
            ``tokens.logprobs`` and ``tokens.entropy`` only.

        Raises:
            MissingColumnError: If a part reads a column that is not there.
        """
        tokens = tokens.replace(layout=own_part(tokens.layout, self.communicator))
        objective, layout = self.objective, tokens.layout
        with torch.autocast(layout.device.type, enabled=False):
            weights = self.weights(layout).to(tokens.logprobs.dtype)
            metrics: dict[str, Stat] = {}
            frozen = self.shaped(tokens.detach(), metrics)
            value = slope = None
            slopes: dict[str, Tensor] = {}
            for scope, part in objective.token_terms().items():
                found = part.value_and_slope(frozen, self.context(scope))
                layout.check(f"{type(part).__name__} value", found.value)
                layout.check(f"{type(part).__name__} slope", found.slope)
                metrics.update(found.metrics)
                if scope == "policy_loss":
                    found = self._corrected(found, frozen, weights, metrics)
                metrics[f"loss/{_LOSS_NAMES.get(scope, scope)}"] = Sum.of(found.value * weights, layout.mask)
                value = found.value if value is None else value + found.value
                slope = found.slope if slope is None else slope + found.slope
                for name, other in found.slopes.items():
                    slopes[name] = slopes[name] + other if name in slopes else other
            assert value is not None and slope is not None
            loss = weighted_sum(tokens.logprobs, value, slope, weights, layout)
            for name, other in slopes.items():  # adds nothing but the gradient of another column
                column = tokens.need(name, objective.name)
                loss = loss + weighted_sum(column, torch.zeros_like(value), other, weights, layout)
            if objective.entropy_coef:
                bonus = layout.select(tokens.need("entropy", "The entropy bonus")) * weights
                loss = loss - objective.entropy_coef * bonus.sum()
                metrics["loss/entropy"] = Sum.of(-objective.entropy_coef * bonus, layout.mask)
        metrics["loss/total"] = Sum.of(loss)
        if tokens.entropy is not None:
            metrics["policy/entropy"] = Mean.of(tokens.entropy, layout.mask)
        if frozen.advantages is not None:
            metrics.update(advantage_metrics(frozen.advantages, layout))
        faults = {
            name: bad_entries(column, readable(objective, tokens, name))
            for name in objective.columns()
            if (column := getattr(tokens, name)) is not None
        }
        if tokens.advantages is not None:
            faults["advantages"] = bad_entries(tokens.advantages, layout.mask)
        faults["loss"] = bad_entries(value * weights, layout.mask)
        faults["slope"] = bad_entries(slope, layout.mask)
        return ObjectiveOutput(loss=loss, metrics=metrics, tokens=layout.mask.sum(), faults=faults)

    def shaped(self, tokens: TokenBatch, metrics: dict[str, Stat] | None = None) -> TokenBatch:
        """The micro-batch with what a distillation term adds to its advantages.

        Args:
            tokens: Columns of one micro-batch, advantages included.
            metrics: Where to put the term's metrics.
        """
        for part in self.objective.shapings():
            tokens, found = part.shape(tokens)
            if metrics is not None:
                metrics.update(found)
        return tokens

    def kept_layout(self, tokens: TokenBatch) -> TokenLayout:
        """The layout without the tokens that corrections take out of the denominators."""
        layout, keep = tokens.layout, tokens.layout.mask
        for scope, part in self.objective.token_parts().items():
            if part.shrinks_denominator:
                keep = keep & part.keep(tokens, self.context(scope))
        smaller = layout.with_mask(keep)
        if "total_tokens" in layout.facts:
            totals = self.communicator.context_sum(smaller.local_counts())
            smaller = smaller.with_facts(total_tokens=totals)
        return smaller

    def _corrected(
        self, found: TokenLoss, tokens: TokenBatch, weights: Tensor, metrics: dict[str, Stat]
    ) -> TokenLoss:
        # Corrections multiply, and drop by selection: a dropped token's loss may be anything.
        factor, keep = None, tokens.layout.mask
        for scope, part in self.objective.corrections().items():
            one = part.token_weights(tokens, self.context(scope))
            factor = one.weight if factor is None else factor * one.weight
            keep = keep & one.keep
            metrics.update(one.metrics)
        if any(part.shrinks_denominator for part in self.objective.token_parts().values()):
            smaller = self.kept_layout(tokens)
            kept = self._weights(smaller, "kept").to(torch.float64)
            share = torch.where(keep, kept / torch.where(weights > 0, weights, 1.0), 0.0)
            factor = share if factor is None else factor * share
        if factor is None:
            return found
        factor = factor.to(found.value.dtype)

        def scaled(column: Tensor) -> Tensor:
            return torch.where(keep, column * factor, 0.0)

        slopes = {name: scaled(other) for name, other in found.slopes.items()}
        return found._replace(value=scaled(found.value), slope=scaled(found.slope), slopes=slopes)

    def summarize(
        self, outputs: Iterable[ObjectiveOutput], extra: Mapping[str, Stat] | None = None
    ) -> Report:
        """Merge the metrics of all micro-batches and ranks, in one collective, into plain numbers.

        Call it after the last backward and before the optimizer step: it is also where a non-finite
        log-probability or loss becomes an error, on all ranks together.

        Args:
            outputs: What `loss` returned for each micro-batch of this rank, dummies included.
            extra: More statistics to report, the same names on every rank. They are about whole sequences
                (`reward_metrics`): of context-parallel ranks that hold the same ones, the first counts.

        Returns:
            Metrics by name, equal on all ranks: a dictionary that also knows what each counted, for `merge_reports`.
            What nothing was measured for is left out.

        Raises:
            NonFiniteError: If a column or loss had a NaN or an infinity at a place that counts.
            WindowError: If the losses did not see exactly the tokens that the window was frozen with, so that
                its weights were wrong.
        """
        return summarize(self.objective, self.communicator, self._counts, outputs, extra or {})


_LOSS_NAMES = {"policy_loss": "policy"}
