"""The window: one optimizer step over all its micro-batches and ranks. Collect, freeze, use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.checks import nonfinite_count
from rlobjectives.component import WindowContext
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.synchronize import Fault, exchange
from rlobjectives.errors import ShapeError, WindowError
from rlobjectives.estimators.base import Estimator
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses.base import TokenLoss, TokenPart
from rlobjectives.losses.weighted_sum import weighted_sum
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Mean, Moments, Stat, Sum, fold
from rlobjectives.tokens import TokenBatch

if TYPE_CHECKING:
    from rlobjectives.objective import Objective

__all__ = ["ObjectiveOutput", "Window", "WindowBuilder"]

_COUNTS = ("tokens", "sequences", "nonempty_sequences")
_PREPASS_COLUMNS = ("logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs", "teacher_logprobs")


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


class WindowBuilder:
    """Collects the micro-batches of one optimizer step on this rank.

    Whatever goes wrong on one rank between here and `freeze` is kept and raised by `freeze` on *all*
    ranks, so that nobody waits for a rank that is gone.

    Args:
        objective: The parts.
        communicator: The ranks of the window.
    """

    def __init__(self, objective: Objective, communicator: Communicator) -> None:
        self.objective = objective
        self.communicator = communicator
        self._micro_batches: list[tuple[Tensor, TokenLayout]] = []
        self._prepass: list[TokenBatch] = []
        self._fault = Fault()
        self._frozen = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run code of this rank (scoring, estimating); an exception is raised by `freeze` on all ranks."""
        try:
            yield
        except Exception as error:  # kept, never dropped: freeze() raises it
            self._fault.note(error)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """The estimator's raw advantages; on failure zeros, and `freeze` raises on all ranks."""
        with self.guard():
            return self.objective.estimator.estimate(rollouts)
        return torch.zeros(rollouts.num_sequences, dtype=torch.float64, device=rollouts.rewards.device)

    def add(self, *, estimate: Tensor, layout: TokenLayout) -> None:
        """Add one micro-batch.

        Args:
            estimate: The micro-batch's rows of the estimate: ``[n]`` (``[n, k]``), or shaped like the mask
                for a token-level estimator.
            layout: Where its tokens lie.
        """
        if self._frozen:
            raise WindowError("This window is frozen. Open a new one with objective.window() for each step.")
        with self.guard():
            _check_estimate(self.objective.estimator, estimate, layout)
            self._count_faults(estimate, layout)
            layout = _own_part(layout, self.communicator)
            self._micro_batches.append((estimate.detach(), layout))

    def add_prepass(self, tokens: TokenBatch) -> None:
        """Add the log-probabilities of the micro-batch last added, for a loss that needs them up front.

        Args:
            tokens: Its columns; advantages may be missing, the window fills them in.
        """
        with self.guard():
            if len(self._prepass) + 1 != len(self._micro_batches):
                raise WindowError(
                    f"add_prepass was called for micro-batch {len(self._prepass)}, but "
                    f"{len(self._micro_batches)} were added. Call add, then add_prepass, for each in turn."
                )
            for name in dict.fromkeys((*_PREPASS_COLUMNS, *self.objective.columns())):
                column: Tensor | None = getattr(tokens, name)
                if column is not None:
                    mask = _readable(self.objective, tokens, name)
                    self._fault.counts[len(self._prepass), name] = _bad(column, mask)
            self._prepass.append(tokens.detach())

    def freeze(self) -> Window:
        """Exchange all statistics in one collective and fix them.

        A second collective runs only where one statistic needs another's result
        (`TokenTerm.prepass_rounds`, `TokenTerm.prepass_reads_advantages`).

        Raises:
            RLObjectivesError: Whatever went wrong on any rank, on all ranks at this point.
        """
        self._frozen = True
        objective, communicator = self.objective, self.communicator
        prepass = {
            scope: part for scope, part in objective.token_parts().items() if part.required().needs_prepass
        }
        shrinking = {scope: part for scope, part in prepass.items() if part.shrinks_denominator}
        with self.guard():
            if prepass and len(self._prepass) != len(self._micro_batches):
                raise WindowError(
                    f"{objective.name} reads the whole window's log-probabilities before its losses, but "
                    f"{len(self._prepass)} of {len(self._micro_batches)} micro-batches came with them. "
                    "Call add_prepass(tokens) after each add()."
                )
        window = Window(objective, communicator, {}, 0)
        start = {scope: int(_waits(part, objective.estimator)) for scope, part in prepass.items()}
        # Which tokens stay is known once the last round of the parts that drop any is over.
        rounds = {
            scope: part.prepass_rounds * bool(part.declared_statistics()) for scope, part in prepass.items()
        }
        counting = max([start[scope] + rounds[scope] for scope in shrinking], default=0)
        last = max([counting, *(start[scope] + rounds[scope] - 1 for scope in prepass)])
        statistics: dict[str, Stat] = {}
        for step in range(last + 1):
            outgoing = self._window_statistics() if step == 0 else {}
            for scope, part in prepass.items():
                turn = step - start[scope]
                if 0 <= turn < rounds[scope]:
                    outgoing.update(self._prepass_statistics(scope, part, window, turn))
            if shrinking and step == counting:
                outgoing.update(self._kept_statistics(shrinking.values(), window))
            outcome = exchange(
                outgoing, communicator, fault=self._fault, micro_batches=len(self._micro_batches)
            )
            statistics.update(outcome.statistics)
            window = Window(objective, communicator, statistics, outcome.micro_batches)
        return window

    def _device(self) -> torch.device:
        if self._micro_batches:
            return self._micro_batches[0][1].device
        return self.communicator.device or torch.device("cpu")

    def _window_statistics(self) -> dict[str, Stat]:
        estimator, reduction = self.objective.estimator, self.objective.reduction
        collected: dict[str, list[Stat]] = {f"window/{name}": [] for name in _COUNTS}
        kinds: dict[str, type[Stat]] = dict.fromkeys(collected, Sum)
        for scope, part in (("estimator", estimator), ("reduction", reduction)):
            for name, kind in part.declared_statistics().items():
                collected[f"{scope}/{name}"], kinds[f"{scope}/{name}"] = [], kind
        with self.guard():
            for estimate, layout in self._micro_batches:
                found: dict[str, Stat] = _counts(layout)
                for scope, stats in (
                    ("estimator", estimator.statistics(estimate, layout)),
                    ("reduction", reduction.statistics(layout)),
                ):
                    found.update({f"{scope}/{name}": stat for name, stat in stats.items()})
                _collect(collected, kinds, found)
        return {name: fold(kinds[name], collected[name], self._device()) for name in kinds}

    def _prepass_statistics(self, scope: str, part: TokenPart, window: Window, turn: int) -> dict[str, Stat]:
        kinds = {f"{scope}/{name}": kind for name, kind in part.round_statistics(turn).items()}
        collected: dict[str, list[Stat]] = {name: [] for name in kinds}
        with self.guard():
            for position, (estimate, layout) in enumerate(self._micro_batches):
                ready = self._prepass[position]
                if part.prepass_reads_advantages:
                    ready = self._with_advantages(position, ready, estimate, layout, window)
                found = part.statistics(ready, window.context(scope, turn))
                _collect(collected, kinds, {f"{scope}/{name}": stat for name, stat in found.items()})
        return {name: fold(kind, collected[name], self._device()) for name, kind in kinds.items()}

    def _with_advantages(
        self, position: int, tokens: TokenBatch, estimate: Tensor, layout: TokenLayout, window: Window
    ) -> TokenBatch:
        advantages = window.advantages(estimate, layout)
        self._fault.counts[position, "advantages"] = _bad(advantages, layout.mask)
        return window.shaped(tokens.replace(advantages=advantages))

    def _kept_statistics(self, shrinking: Iterable[TokenPart], window: Window) -> dict[str, Stat]:
        reduction = self.objective.reduction
        kinds: dict[str, type[Stat]] = {f"kept/window/{name}": Sum for name in _COUNTS}
        kinds.update({f"kept/{name}": kind for name, kind in reduction.declared_statistics().items()})
        collected: dict[str, list[Stat]] = {name: [] for name in kinds}
        with self.guard():
            for position, (estimate, whole) in enumerate(self._micro_batches):
                ready = self._prepass[position].replace(layout=whole)
                if any(part.prepass_reads_advantages for part in shrinking):
                    ready = self._with_advantages(position, ready, estimate, whole, window)
                layout = window.kept_layout(ready)
                found = {f"kept/{name}": stat for name, stat in reduction.statistics(layout).items()}
                found.update({f"kept/{name}": stat for name, stat in _counts(layout).items()})
                _collect(collected, kinds, found)
        return {name: fold(kinds[name], collected[name], self._device()) for name in kinds}

    def _count_faults(self, estimate: Tensor, layout: TokenLayout) -> None:
        # Judged in float32, the precision advantages are used in: 1e300 is not finite there.
        mask = layout.mask if self.objective.estimator.token_level else layout.sequence_mask()
        if estimate.dim() > mask.dim():
            mask = mask.unsqueeze(-1).expand_as(estimate)
        self._fault.counts[len(self._micro_batches), "estimate"] = _bad(estimate.float(), mask)


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
            for name in _COUNTS
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
            counts = {name: own.pop(f"window/{name}").row[0] for name in _COUNTS}
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
        _check_estimate(estimator, estimate, layout)
        final = estimator.finalize(estimate.detach(), layout, self.context("estimator"))
        if not estimator.token_level and final.dim() == 1:
            final = layout.expand(final)
        layout.check(f"{type(estimator).__name__}.finalize", final)
        return layout.select(final)

    def weights(self, layout: TokenLayout) -> Tensor:
        """Weight of each token in the window's loss: float64, shaped like the mask, 0 where it is false."""
        return self._weights(layout, "reduction")

    def _weights(self, layout: TokenLayout, scope: str) -> Tensor:
        layout = _own_part(layout, self.communicator)
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
        tokens = tokens.replace(layout=_own_part(tokens.layout, self.communicator))
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
        if tokens.advantages is not None:
            metrics["advantage/"] = Moments.of(tokens.advantages, layout.mask)
        faults = {
            name: _bad(column, _readable(objective, tokens, name))
            for name in objective.columns()
            if (column := getattr(tokens, name)) is not None
        }
        if tokens.advantages is not None:
            faults["advantages"] = _bad(tokens.advantages, layout.mask)
        faults["loss"] = _bad(value * weights, layout.mask)
        faults["slope"] = _bad(slope, layout.mask)
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
    ) -> dict[str, float]:
        """Merge the metrics of all micro-batches and ranks, in one collective, into plain numbers.

        Call it after the last backward and before the optimizer step: it is also where a non-finite
        log-probability or loss becomes an error, on all ranks together.

        Args:
            outputs: What `loss` returned for each micro-batch of this rank, dummies included.
            extra: More statistics to report, the same names on every rank. They are about whole sequences
                (`reward_metrics`): of context-parallel ranks that hold the same ones, the first counts.

        Returns:
            Metrics by name, equal on all ranks. What nothing was measured for is left out.

        Raises:
            NonFiniteError: If a column or loss had a NaN or an infinity at a place that counts.
            WindowError: If the losses did not see exactly the tokens that the window was frozen with, so that
                its weights were wrong.
        """
        fault = Fault()
        collected: dict[str, list[Stat]] = {name: [] for name in self.objective.metric_kinds()}
        kinds = dict(self.objective.metric_kinds())
        collected[_SEEN], kinds[_SEEN] = [], Mean
        device = self._counts["tokens"].device
        try:
            for position, output in enumerate(outputs):
                _collect(collected, kinds, output.metrics)
                collected[_SEEN].append(Mean(torch.stack([output.tokens, torch.ones_like(output.tokens)])))
                for name, counts in output.faults.items():
                    fault.counts[position, name] = counts
            if taken := set(extra or {}) & set(collected):
                raise WindowError(
                    f"extra holds {sorted(taken)}, which the objective reports itself. Rename them."
                )
        except Exception as error:  # raised by the exchange, on all ranks
            fault.note(error)
        for name, stat in (extra or {}).items():
            collected[name], kinds[name] = [stat] * self.communicator.owns_sequences, type(stat)
        merged = {name: fold(kind, collected[name], device) for name, kind in kinds.items()}
        result = exchange(merged, self.communicator, fault=fault).statistics
        self._check_seen(result.pop(_SEEN))
        labels = ["window/tokens", "window/sequences"]
        numbers = [self._counts["tokens"], self._counts["sequences"]]
        measured = [torch.ones_like(number, dtype=torch.bool) for number in numbers]
        for name, stat in result.items():
            report = stat.report(name)
            labels += report
            numbers += report.values()
            measured += [stat.measured] * len(report)
        values = torch.stack([number.to(device) for number in numbers]).tolist()
        kept = torch.stack([flag.to(device) for flag in measured]).tolist()
        return {label: value for label, value, keep in zip(labels, values, kept, strict=True) if keep}

    def _check_seen(self, seen: Stat) -> None:
        (tokens, losses), counted = seen.row.tolist(), float(self._counts["tokens"])
        if losses and tokens != counted:
            raise WindowError(
                f"the losses saw {tokens:,.0f} tokens, but the window was frozen with {counted:,.0f}, so every weight "
                "is wrong. Hand summarize() the output of every micro-batch once, and change no mask after freeze()."
            )


_LOSS_NAMES = {"policy_loss": "policy"}
_SEEN = "window/seen"


def _counts(layout: TokenLayout) -> dict[str, Stat]:
    counted = layout.sequence_mask()
    return {
        "window/tokens": Sum.of(layout.mask),
        "window/sequences": Sum.of(counted),
        "window/nonempty_sequences": Sum.of(counted & (layout.token_counts() > 0)),
    }


def _readable(objective: Objective, tokens: TokenBatch, name: str) -> Tensor:
    # Counted tokens at which a column must be finite: all, unless a part takes unknown ones upon itself.
    known = tokens.known(name) if name in objective.tolerated() else None
    return tokens.layout.mask if known is None else tokens.layout.mask & known


def _waits(part: TokenPart, estimator: Estimator) -> bool:
    # Without statistics of its own an estimator has nothing to wait for; one that reads the window's counts all
    # the same gets NaN from them, and its advantages are counted as a fault.
    return part.prepass_reads_advantages and bool(estimator.declared_statistics())


def _own_part(layout: TokenLayout, communicator: Communicator) -> TokenLayout:
    # Under context parallelism nobody may take the tokens at hand for the whole sequence, and one rank counts it.
    if communicator.context_group is None:
        return layout
    if not communicator.owns_sequences:
        layout = layout.with_facts(sequence_mask=torch.zeros_like(layout.sequence_mask()))
    return layout.as_shard()


def _bad(column: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    total = mask.sum()
    return nonfinite_count(column.detach(), mask), total


def _collect(
    collected: dict[str, list[Stat]], kinds: Mapping[str, type[Stat]], found: Mapping[str, Stat]
) -> None:
    for name, stat in found.items():
        if kinds.get(name) is not type(stat):
            declared = getattr(kinds.get(name), "__name__", "nothing")
            raise WindowError(
                f"statistic {name!r} is a {type(stat).__name__}, but {declared} was declared. Declare every "
                "statistic and metric of a part (window_statistics, metrics), with its kind."
            )
        collected[name].append(stat)


def _check_estimate(estimator: Estimator, estimate: Tensor, layout: TokenLayout) -> None:
    name = f"{type(estimator).__name__} estimate"
    if estimator.token_level:
        layout.check_columns(name, estimate)
    elif estimate.dim() not in (1, 2) or estimate.shape[0] != layout.num_sequences:
        raise ShapeError(
            f"{name} has shape {list(estimate.shape)}; expected [{layout.num_sequences}] or "
            f"[{layout.num_sequences}, k], one row a sequence of the layout. Pass estimate[rows] with the "
            "layout of the same rows."
        )
