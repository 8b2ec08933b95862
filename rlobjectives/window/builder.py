"""Collecting the micro-batches of a window, and freezing what is known of all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from rlobjectives.columns import LOGPROBS
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.distributed.ending import ends_together
from rlobjectives.distributed.synchronize import Fault, exchange
from rlobjectives.errors import WindowError
from rlobjectives.estimators.base import Estimator
from rlobjectives.layouts import TokenLayout
from rlobjectives.rollouts import Rollouts, check_rollouts
from rlobjectives.statistics import Stat, Sum
from rlobjectives.statistics.tally import Tally
from rlobjectives.token_parts import reading
from rlobjectives.tokens import TokenBatch, check_tokens
from rlobjectives.window.micro_batches import (
    COUNTS,
    check_estimate,
    check_read,
    check_rollouts_read,
    column_faults,
    count_statistics,
    own_part,
    readable,
)
from rlobjectives.window.parts import WindowParts
from rlobjectives.window.schedule import Turn, plan
from rlobjectives.window.summary import Added
from rlobjectives.window.window import Window, take_untold

__all__ = ["WindowBuilder"]


class WindowBuilder:
    """Collects the micro-batches of one optimizer step on this rank.

    Whatever goes wrong on one rank between here and `freeze` is kept and raised by `freeze` on *all*
    ranks, so that nobody waits for a rank that is gone.

    Args:
        objective: The parts.
        communicator: The ranks of the window.
    """

    def __init__(self, objective: WindowParts, communicator: Communicator) -> None:
        self.objective = objective
        self.communicator = communicator
        self._micro_batches: list[tuple[Tensor, TokenLayout]] = []
        self._prepass: list[TokenBatch] = []
        self._fault = Fault(columns=objective.own_columns)
        self._frozen = False

    def guard(self) -> AbstractContextManager[None]:
        """Run code of this rank (scoring, estimating); an exception is raised by `freeze` on all ranks.

        ``KeyboardInterrupt`` and ``SystemExit`` too. The other ranks raise `RankError` with kind and text of it.
        """
        return self._fault.guard()

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """The estimator's raw advantages; on failure zeros, and `freeze` raises on all ranks."""
        check_rollouts(rollouts)
        with self.guard():
            check_rollouts_read(self.objective, rollouts)
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
            check_estimate(self.objective.estimator, estimate, layout)
            self._count_estimate(estimate, layout)
            layout = own_part(layout, self.communicator)
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
            check_tokens(tokens)
            check_read(tokens.extra, self.objective.reads(), self.objective.name)
            for name in dict.fromkeys((*LOGPROBS, *self.objective.columns(), *self.objective.own_columns)):
                column = tokens.get(name)
                if column is not None:
                    mask = readable(self.objective, tokens, name)
                    self._count_faults(len(self._prepass), name, column, mask)
            self._prepass.append(tokens.detach())

    def freeze(self) -> Window:
        """Exchange all statistics in one collective and fix them.

        A second collective runs only where one statistic needs another's result
        (`TokenPart.rounds`, `TokenPart.prepass_reads_advantages`). The host waits for the device once in each,
        and once more if the estimator whitens.

        Raises:
            RLObjectivesError: Whatever went wrong on any rank, on all ranks at this point.

        Warns:
            UserWarning: On all ranks, if the estimator whitens over fewer than two counted samples. No error, because
                a long run may have such a step where sequences are dropped; a configuration in which every step is one
                is refused by `Objective.check`.
        """
        if self._frozen:
            raise WindowError(
                "This window is frozen already. Open a new one with objective.window() for each step."
            )
        self._frozen = True
        objective, communicator = self.objective, self.communicator
        # Of a window that was never summarized; a window of one process alone, such as a trial, has no part in it.
        if communicator.world_size > 1 and (untold := take_untold()) is not None:
            self._fault.note(untold)
        agreement: dict[str, str] = {}
        with self.guard():
            agreement = objective.descriptions()
        prepass = {
            scope: part for scope, part in objective.token_parts().items() if part.required().needs_prepass
        }
        with self.guard():
            if prepass and len(self._prepass) != len(self._micro_batches):
                raise WindowError(
                    f"{objective.name} reads the whole window's log-probabilities before its losses, but "
                    f"{len(self._prepass)} of {len(self._micro_batches)} micro-batches came with them. "
                    "Call add_prepass(tokens) after each add()."
                )
        window = Window(objective, communicator, {}, 0)
        schedule = plan(prepass, estimator_waits=bool(objective.estimator.declared_statistics()))
        statistics: dict[str, Stat] = {}
        own_tokens = torch.zeros((), dtype=torch.float64)
        for step, turns in enumerate(schedule.exchanges):
            tally = Tally(self._kinds(turns, first=step == 0, kept=step == schedule.kept))
            if step == 0:
                self._measure_window(tally)
            for turn in turns:
                self._measure_round(tally, turn, window)
            if step == schedule.kept:
                self._measure_kept(tally, window)
            outgoing = tally.folded(self._device())
            own_tokens = outgoing["window/tokens"].row[0] if step == 0 else own_tokens
            outcome = exchange(
                outgoing,
                communicator,
                fault=self._fault,
                micro_batches=len(self._micro_batches),
                agreement=agreement,
            )
            statistics.update(outcome.statistics)
            added = Added(outcome.counts, own_tokens)
            window = Window(objective, communicator, statistics, outcome.micro_batches, added=added)
        few = objective.estimator.few_samples(window.context("estimator"))
        if few is not None and window.holds(few):
            warnings.warn(_few_samples(objective.estimator), stacklevel=2)
        return window

    @contextmanager
    def _parts(self) -> Iterator[None]:
        """Run parts that may add up over a context group, whose ranks wait inside for one that has failed."""
        if self.communicator.context_group is None or self.communicator.world_size == 1:
            with self.guard():
                yield
            return
        with ends_together(self.communicator):
            if self._fault.error is not None:
                raise self._fault.error
            yield

    def _device(self) -> torch.device:
        if self._micro_batches:
            return self._micro_batches[0][1].device
        return self.communicator.device or torch.device("cpu")

    def _kinds(self, turns: Iterable[Turn], *, first: bool, kept: bool) -> dict[str, type[Stat]]:
        """What an exchange carries, by the name it travels under."""
        estimator, reduction = self.objective.estimator, self.objective.reduction
        counts = dict.fromkeys((f"window/{name}" for name in COUNTS), Sum)
        scopes: list[tuple[str, Mapping[str, type[Stat]]]] = []
        if first:
            scopes += [("", counts), ("estimator/", estimator.declared_statistics())]
            scopes += [("reduction/", reduction.declared_statistics())]
        scopes += [(f"{turn.scope}/", turn.round.kinds) for turn in turns]
        if kept:
            scopes += [("kept/", {**counts, **reduction.declared_statistics()})]
        return {f"{scope}{name}": kind for scope, kinds in scopes for name, kind in kinds.items()}

    def _measure_window(self, tally: Tally) -> None:
        estimator, reduction = self.objective.estimator, self.objective.reduction
        with self.guard():
            for estimate, layout in self._micro_batches:
                tally.add(count_statistics(layout))
                tally.add(estimator.statistics(estimate, layout), "estimator")
                tally.add(reduction.statistics(layout), "reduction")
            own = (name for name in tally.missing if name.startswith(("estimator/", "reduction/")))
            if self._micro_batches and (never := ", ".join(map(repr, own))):
                raise WindowError(
                    f"statistics() never returned {never}, which its part declares in "
                    "window_statistics, so finalize() or weights() would read an empty one. Return each declared "
                    "statistic for every micro-batch."
                )

    def _measure_round(self, tally: Tally, turn: Turn, window: Window) -> None:
        with self._parts():
            for position, (estimate, layout) in enumerate(self._micro_batches):
                ready = self._prepass[position]
                if turn.part.prepass_reads_advantages:
                    ready = self._with_advantages(position, ready, estimate, layout, window)
                with reading(turn.part, ready):
                    found = turn.round.measure(ready, window.context(turn.scope, turn.number))
                tally.add(found, turn.scope)

    def _measure_kept(self, tally: Tally, window: Window) -> None:
        shrinking = [part for part in self.objective.token_parts().values() if part.shrinks_denominator]
        with self._parts():
            for position, (estimate, whole) in enumerate(self._micro_batches):
                ready = self._prepass[position]
                ready = ready.replace(layout=own_part(ready.layout, self.communicator))
                if any(part.prepass_reads_advantages for part in shrinking):
                    ready = self._with_advantages(position, ready, estimate, whole, window)
                layout = window.kept_layout(ready)
                tally.add({**count_statistics(layout), **self.objective.reduction.statistics(layout)}, "kept")

    def _with_advantages(
        self, position: int, tokens: TokenBatch, estimate: Tensor, layout: TokenLayout, window: Window
    ) -> TokenBatch:
        advantages = window.advantages(estimate, layout)
        self._count_faults(position, "advantages", advantages, layout.mask)
        return window.shaped(tokens.replace(advantages=advantages))

    def _count_faults(self, micro_batch: int, name: str, column: Tensor, mask: Tensor) -> None:
        for field, found in column_faults(name, column, mask).items():
            self._fault.counts[micro_batch, field] = found

    def _count_estimate(self, estimate: Tensor, layout: TokenLayout) -> None:
        # Judged in float32, the precision advantages are used in: 1e300 is not finite there.
        mask = layout.mask if self.objective.estimator.token_level else layout.sequence_mask()
        if estimate.dim() > mask.dim():
            mask = mask.unsqueeze(-1).expand_as(estimate)
        self._count_faults(len(self._micro_batches), "estimate", estimate.float(), mask)


def _few_samples(estimator: Estimator) -> str:
    return (
        f"{type(estimator).__name__} compares the sequences of an optimizer step with each other, and this step has fewer "
        "than two that count, over all ranks: every advantage of that comparison is 0 in it. If that is so in every step, "
        "nothing is learned: let a step have more sequences. Now and then it happens where sequences are dropped (dynamic "
        "sampling, unscored or truncated answers)."
    )
