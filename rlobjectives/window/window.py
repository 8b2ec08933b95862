"""A frozen window: advantages, weights and losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import reading
from rlobjectives.statistics import Stat
from rlobjectives.tokens import TokenBatch, check_tokens
from rlobjectives.window.loss import window_loss
from rlobjectives.window.micro_batches import COUNTS, check_estimate, own_part
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
        return layout.select(final if final.is_floating_point() else final.to(torch.float64))

    def weights(self, layout: TokenLayout) -> Tensor:
        """Weight of each token in the window's loss: float64, shaped like the mask, 0 where it is false."""
        layout = own_part(layout, self.communicator)
        return layout.select(self.raw_weights(layout, self.context("reduction")))

    def raw_weights(
        self, layout: TokenLayout, context: WindowContext, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """`weights` before masked places become 0; where all tokens of a sequence share one, a view.

        Args:
            layout: As this rank may count it.
            context: Of the scope ``"reduction"``, or ``"kept"``.
            dtype: What they are rounded to.
        """
        weights = self.objective.reduction.weights(layout, context)
        # Also to the device: a rank that had no micro-batch does not know where its weights lie.
        weights = weights.to(layout.device, dtype)
        if not self.objective.reduction.token_level:
            weights = layout.expand(weights)
        layout.check(f"{type(self.objective.reduction).__name__}.weights", weights)
        return weights

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
        check_tokens(tokens)
        tokens = tokens.replace(layout=own_part(tokens.layout, self.communicator))
        with torch.autocast(tokens.layout.device.type, enabled=False):
            return window_loss(self, tokens)

    def shaped(self, tokens: TokenBatch, metrics: dict[str, Stat] | None = None) -> TokenBatch:
        """The micro-batch with what a distillation term adds to its advantages.

        Args:
            tokens: Columns of one micro-batch, advantages included.
            metrics: Where to put the term's metrics.
        """
        for part in self.objective.shapings():
            with reading(part, tokens):
                tokens, found = part.shape(tokens)
            if metrics is not None:
                metrics.update(found)
        return tokens

    def kept_layout(self, tokens: TokenBatch) -> TokenLayout:
        """The layout without the tokens that corrections take out of the denominators."""
        layout, keep = tokens.layout, tokens.layout.mask
        for scope, part in self.objective.token_parts().items():
            if part.shrinks_denominator:
                with reading(part, tokens):
                    keep = keep & part.keep(tokens, self.context(scope))
        smaller = layout.with_mask(keep)
        if "total_tokens" in layout.facts:
            totals = self.communicator.context_sum(smaller.local_counts())
            smaller = smaller.with_facts(total_tokens=totals)
        return smaller

    def summarize(
        self, outputs: Iterable[ObjectiveOutput], extra: Mapping[str, Stat] | None = None
    ) -> Report:
        """Merge the metrics of all micro-batches and ranks, in one collective, into plain numbers.

        Call it after the last backward and before the optimizer step: it is also where a non-finite
        log-probability, loss or slope becomes an error, on all ranks together, and so does a log-probability above 0.

        What it cannot see is made later: backward goes on from the slopes through what the columns were computed from
        (`vocabulary_divergence`, log-probabilities from logits or hidden states, the model), where low precision may
        overflow. Look at the norm of the gradients for that, as ``clip_grad_norm_(…, error_if_nonfinite=True)`` does.

        Args:
            outputs: What `loss` returned for each micro-batch of this rank, dummies included.
            extra: More statistics to report, the same names on every rank. They are about whole sequences
                (`reward_metrics`): of context-parallel ranks that hold the same ones, the first counts.

        Returns:
            Metrics by name, equal on all ranks: a dictionary that also knows what each counted, for `merge_reports`.
            What nothing was measured for is left out.

        Raises:
            NonFiniteError: If a column, loss or slope had a NaN or an infinity at a place that counts, or a
                log-probability was above 0.
            WindowError: If the losses did not see exactly the tokens that the window was frozen with, so that
                its weights were wrong.
        """
        return summarize(self.objective, self.communicator, self._counts, outputs, extra or {})
