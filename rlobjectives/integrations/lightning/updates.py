"""Updates: optimizer steps on the sequences of a rollout, each with its window and micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlobjectives.distributed import GradientScale, replay
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.integrations.lightning.experience import COLUMNS, Experience
from rlobjectives.objective import Objective
from rlobjectives.statistics import Mean, Stat, measured_values
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import ObjectiveOutput, Report, Window, merge_reports

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.engine import Engine
    from rlobjectives.integrations.lightning.host import TrainedModule

__all__ = ["RoundMetrics", "Updates"]


class Updates:
    """Takes optimizer steps on a rollout with one objective.

    Collectives, beside those of the engine: one to open each window, one to summarise it; and one integer before each
    pre-pass that has to run a forward.

    Args:
        module: Supplies `score` and the configuration.
        engine: How the trainer's strategy runs forward, backward and step.
        metrics: Takes in what the updates report.
        objective: What to train for; by default the module's.
    """

    norm_name: ClassVar[str] = "optim/grad_norm"

    def __init__(
        self,
        module: TrainedModule,
        engine: Engine,
        metrics: RoundMetrics,
        objective: Objective | None = None,
    ) -> None:
        self.module = module
        self.engine = engine
        self.metrics = metrics
        self.objective = module.objective if objective is None else objective
        self.communicator = engine.communicator()
        self.scale = GradientScale(averaged_ranks=engine.data_ranks)

    def update(
        self, experience: Experience, estimate: Tensor, plan: list[list[int]], *, old_are_current: bool
    ) -> None:
        """Open a window, run its micro-batches, and step; or skip a window in which nothing counts.

        Args:
            experience: The whole rollout of this rank.
            estimate: Raw advantages of its sequences, or tokens.
            plan: Positions of the window's sequences, by micro-batch.
            old_are_current: The old log-probabilities have just been found with the current weights, so that a
                pre-pass may take them.
        """
        share = self._share(experience, [row for rows in plan for row in rows])
        micro_batches = [(share.rows(local), estimate[rows]) for local, rows in _positions(plan, experience)]
        window = self._open(share, micro_batches, reuse=old_are_current)
        if window.empty:
            self.metrics.report({"optim/skipped_fraction": Mean.of(torch.ones(1))}, update=True)
            return
        outputs = [
            self._accumulate(window, *pair, last=position == window.micro_batches - 1)
            for position, pair in enumerate(self._padded(window, share, micro_batches, estimate))
        ]
        report = window.summarize(outputs)
        norm = self._step()
        self._report(report)  # not before: a step that is refused comes again after a resume
        self.module.step_schedulers()
        self.metrics.report(
            {self.norm_name: Mean.of(norm.reshape(1)), "optim/skipped_fraction": Mean.of(torch.zeros(1))},
            update=True,
        )

    # What differs between kinds of updates.

    def _columns(self, micro_batch: Experience) -> dict[str, Tensor | None]:
        """The columns that carry gradient, from a forward through the engine."""
        logprobs, entropy = self.engine.forward(micro_batch)
        return {"logprobs": logprobs, "entropy": entropy}

    def _tokens(self, micro_batch: Experience, columns: Mapping[str, Tensor | None]) -> TokenBatch:
        """What the losses read: the rollout's columns, and those that a forward has just found."""
        known = {name: getattr(micro_batch, name) for name in COLUMNS if name in self.objective.columns()}
        own = {
            name: micro_batch.extra[name] for name in self.objective.own_columns if name in micro_batch.extra
        }
        found = {
            "entropy": None,
            "values": None,
            "old_values": micro_batch.values,
            **columns,
        }  # not those of the rollout
        return TokenBatch(layout=micro_batch.layout, extra=own, **{**known, **found})

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def _step(self) -> Tensor:
        """Change the weights; gives the norm of the gradient."""
        return self.engine.step(self.module.single_optimizer(), self.module.gradient_clip_val)

    def _report(self, report: Report) -> None:
        self.metrics.add(report, self.objective.metric_kinds())

    # One window.

    def _share(self, experience: Experience, rows: list[int]) -> Experience:
        """This rank's sequences of the window, their layout knowing the size of each prompt's group."""
        share = experience.rows(rows)
        group_ids = experience.need_rollouts().group_ids[torch.as_tensor(rows, dtype=torch.long)]
        return share.replace(layout=share.layout.with_prompts(group_ids.to(share.device)))

    def _open(
        self, share: Experience, micro_batches: list[tuple[Experience, Tensor]], *, reuse: bool
    ) -> Window:
        builder = self.objective.window(self.communicator)
        needs_prepass = self.objective.capabilities.needs_prepass
        scored: list[dict[str, Tensor | None]] = [{}] * len(micro_batches)
        if needs_prepass and reuse:
            scored = [
                {"logprobs": micro_batch.old_logprobs, "entropy": micro_batch.entropy}
                for micro_batch, _ in micro_batches
            ]
        elif needs_prepass:
            count = exchange({}, self.communicator, micro_batches=len(micro_batches)).micro_batches
            passes = [micro_batch for micro_batch, _ in micro_batches]
            passes += [share.dummy()] * (count - len(passes))
            started = time.perf_counter()
            with replay(self.module):
                scored = [self._frozen(micro_batch) for micro_batch in passes]
            self.metrics.values.setdefault("time/prepass_seconds", 0.0)
            self.metrics.values["time/prepass_seconds"] += time.perf_counter() - started
        for (micro_batch, rows), columns in zip(micro_batches, scored, strict=False):
            builder.add(estimate=rows, layout=micro_batch.layout)
            if columns:
                builder.add_prepass(self._tokens(micro_batch, columns))
        return builder.freeze()

    def _frozen(self, micro_batch: Experience) -> dict[str, Tensor | None]:
        """Log-probabilities and entropies under the current weights, without gradient."""
        logprobs, entropy = self.engine.forward(micro_batch)
        return {"logprobs": logprobs.detach(), "entropy": None if entropy is None else entropy.detach()}

    def _padded(
        self,
        window: Window,
        share: Experience,
        micro_batches: list[tuple[Experience, Tensor]],
        estimate: Tensor,
    ) -> Iterator[tuple[Experience, Tensor]]:
        """The micro-batches, and dummies up to the largest number on any rank."""
        yield from micro_batches
        for _ in range(window.micro_batches - len(micro_batches)):
            dummy = share.dummy()
            token_level = self.objective.estimator.token_level
            tokens = len(dummy.layout.shape)
            shape = (
                (*dummy.layout.shape, *estimate.shape[tokens:]) if token_level else (1, *estimate.shape[1:])
            )
            yield dummy, estimate.new_zeros(shape)

    def _accumulate(
        self, window: Window, micro_batch: Experience, rows: Tensor, *, last: bool
    ) -> ObjectiveOutput:
        advantages = window.advantages(rows, micro_batch.layout)
        with self.engine.micro_batch(last=last):
            found = self._columns(micro_batch)
            columns = {**found, "advantages": advantages}
            # A wrong shape from the module's forward, too, leaves a zero for this rank's backward to carry.
            output = window.shared(lambda: window.loss(self._tokens(micro_batch, columns)), found)
            self._backward(output.loss * self.scale.factor)
        return output


class RoundMetrics:
    """Metrics of a round: what is known of its rollout, and its updates' reports put together by what they counted."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._reports: list[Mapping[str, float]] = []
        self._kinds: dict[str, type[Stat]] = {}

    def report(self, statistics: Mapping[str, Stat], *, update: bool = False) -> None:
        """Take in statistics that are already merged over ranks: of the rollout, or of one update."""
        found = measured_values(statistics)
        if update:
            self.add(found, {})
        else:
            self.values.update(found)

    def add(self, report: Mapping[str, float], kinds: Mapping[str, type[Stat]]) -> None:
        """Take in the report of one update's window."""
        self._reports.append(report)
        self._kinds.update(kinds)

    def go_on(self, other: RoundMetrics) -> None:
        """Take over what has been reported of a rollout before it was put aside."""
        self.values.update(other.values)
        self._reports = [*other._reports, *self._reports]
        self._kinds.update(other._kinds)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, to go on from."""
        reports = [[dict(one), one.weights if isinstance(one, Report) else None] for one in self._reports]
        return {"values": dict(self.values), "reports": reports}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], kinds: Mapping[str, type[Stat]]) -> RoundMetrics:
        """The inverse of `state_dict`.

        Args:
            state: What was stored.
            kinds: The statistic behind each metric of a window.
        """
        found = cls()
        found.values.update(state["values"])
        for numbers, weights in state["reports"]:
            found.add(numbers if weights is None else Report(numbers, weights), kinds)
        return found

    def all(self) -> dict[str, float]:
        """Everything, by name."""
        return {**self.values, **merge_reports(self._reports, self._kinds)}


def _positions(plan: list[list[int]], experience: Experience) -> Iterator[tuple[list[int], Tensor]]:
    """Each micro-batch's rows, counted in the window and in the rollout."""
    start = 0
    for rows in plan:
        yield (
            list(range(start, start + len(rows))),
            torch.as_tensor(rows, dtype=torch.long, device=experience.device),
        )
        start += len(rows)
