"""A frozen window: advantages, weights and losses of its micro-batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.ending import ends_together
from rlobjectives.distributed.faults import Fault, in_words
from rlobjectives.layouts import TokenLayout
from rlobjectives.statistics import Stat
from rlobjectives.token_parts import reading
from rlobjectives.tokens import TokenBatch, check_tokens
from rlobjectives.window.loss import window_loss
from rlobjectives.window.micro_batches import COUNTS, check_estimate, own_part
from rlobjectives.window.parts import WindowParts
from rlobjectives.window.reports import Report
from rlobjectives.window.summary import Added, ObjectiveOutput, stand_in, summarize

__all__ = ["Window", "take_untold"]

_LOG = logging.getLogger("rlobjectives")


class Window:
    """One optimizer step with everything known about it. Immutable; made by `WindowBuilder.freeze`.

    Args:
        objective: The parts.
        communicator: The ranks.
        statistics: Merged statistics, by part and name.
        micro_batches: Largest number on any rank.
        added: How many each rank has; None where that is not known.

    Attributes:
        objective: The parts.
        communicator: The ranks.
        micro_batches: Largest number of micro-batches on any rank: pad the others with dummies up to it.
        empty: No token counts anywhere; the same on all ranks. Skip backward, optimizer and scheduler.
    """

    def __init__(
        self,
        objective: WindowParts,
        communicator: Communicator,
        statistics: Mapping[str, Stat],
        micro_batches: int,
        *,
        added: Added | None = None,
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
        self._added = added
        self._fault = Fault(columns=objective.own_columns)

    @property
    def empty(self) -> bool:
        """Whether no token counts on any rank."""
        if self._empty is None:
            self._empty = not bool(self._counts["tokens"] > 0)
        return self._empty

    def holds(self, condition: Tensor) -> bool:
        """Whether a condition, 0-d bool on the window's device, holds and any token counts; `empty` is known then, too."""
        tokens = self._counts["tokens"]
        # Together: each look at the device is a wait.
        counted, here = torch.stack([tokens > 0, condition.to(tokens.device)]).tolist()
        self._empty = not counted
        return bool(counted and here)

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

    def guard(self) -> AbstractContextManager[None]:
        """Run the forward, loss and backward of a micro-batch: an exception on one rank ends all ranks within seconds.

        See `ends_together`, which may as well stand around the whole training loop. Without it a rank whose forward
        fails leaves the others waiting in the collectives of their backward, which is unaware of windows.
        """
        return ends_together(self.communicator)

    def loss(self, tokens: TokenBatch) -> ObjectiveOutput:
        """This micro-batch's share of the window's loss, with metrics. No host sync, and no communication but sums over a context group.

        With several ranks, what goes wrong in here on one of them (an exception of a part, a wrong shape) is logged and
        kept: the result is a zero attached to the graph, so that this rank's backward still takes part in the
        collectives of the others, and `summarize` raises on all ranks. So call `summarize` for every window; the next
        `WindowBuilder.freeze` raises what is left. Under context parallelism it is raised here and ends all ranks within
        seconds (`ends_together`): those that share its sequences wait for this rank inside their losses.

        Args:
            tokens: Columns of one micro-batch; a dummy with a mask that is false everywhere gives an exact
                zero that is attached to the graph.

        Returns:
            Loss (0-d, in the log-probabilities' precision, float32 at least) and metrics. Gradient flows to
            ``tokens.logprobs`` and ``tokens.entropy`` only.

        Raises:
            MissingColumnError: In a single process, if a part reads a column that is not there; and whatever else a
                part raises.
        """
        columns = {one.name: getattr(tokens, one.name, None) for one in fields(TokenBatch)}
        return self.shared(lambda: self._loss(tokens), columns)

    def shared(
        self, compute: Callable[[], ObjectiveOutput], columns: Mapping[str, object]
    ) -> ObjectiveOutput:
        """What `compute` gives; with several ranks, a stand-in of 0 where it raises, and `summarize` raises (see `loss`).

        Args:
            compute: Makes the loss from columns that a forward has found, on this rank alone.
            columns: Of which those with a gradient carry the stand-in's, which is 0.
        """
        if self.communicator.world_size == 1:
            return compute()
        if self.communicator.context_group is not None:  # whose ranks add up inside, and would wait there
            with ends_together(self.communicator):
                return compute()
        fault = Fault()
        with fault.guard():
            return compute()
        assert fault.error is not None
        self._keep(fault.error)
        return stand_in(columns)

    def _loss(self, tokens: TokenBatch) -> ObjectiveOutput:
        check_tokens(tokens)
        tokens = tokens.replace(layout=own_part(tokens.layout, self.communicator))
        with torch.autocast(tokens.layout.device.type, enabled=False):
            return window_loss(self, tokens)

    def _keep(self, error: BaseException) -> None:
        """Note an error until `summarize` raises it on all ranks, or the next window's `freeze`."""
        _LOG.error(
            "%s in the loss of a window; kept until all ranks can raise it", in_words(error), exc_info=error
        )
        self._fault.note(error)
        _untold.error = self._fault.error

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
                its weights were wrong; naming ranks that ran fewer losses than they had micro-batches.
            RLObjectivesError: Whatever went wrong in `loss` on any rank, on all of them.
        """
        if self._fault.error is not None:
            take_untold()
        return summarize(
            self.objective,
            self.communicator,
            self._counts,
            outputs,
            extra or {},
            fault=self._fault,
            added=self._added,
        )


class _Untold(threading.local):
    """The error of a loss that no exchange has raised yet."""

    error: BaseException | None = None


_untold = _Untold()


def take_untold() -> BaseException | None:
    """The error that a window of this rank keeps and nobody has raised, if any; whoever takes it must raise it."""
    error, _untold.error = _untold.error, None
    return error
