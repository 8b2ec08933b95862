"""One round: train on one rollout, through its epochs, windows and micro-batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.distributed import Fault, replay
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.integrations.lightning.experience import COLUMNS, TOKEN_COLUMNS, Experience
from rlobjectives.integrations.lightning.normalization import estimate_moments, normalized_estimate
from rlobjectives.integrations.lightning.plan import Plan, Turn, plan_updates
from rlobjectives.integrations.lightning.randomness import derive_seed
from rlobjectives.integrations.lightning.unfinished import UnfinishedRollout
from rlobjectives.integrations.lightning.updates import RoundMetrics, Updates
from rlobjectives.metrics import group_metrics, length_metrics, reward_metrics
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Moments, Stat
from rlobjectives.window.micro_batches import check_rollouts_read

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.engine import Engine
    from rlobjectives.integrations.lightning.host import TrainedModule

__all__ = ["Round"]


class Round:
    """One rollout and the optimizer steps taken on it. Lives for one ``training_step``.

    The module's ``unfinished`` holds the rollout while steps are left, and after a stop before the last of them.

    Collectives, beside those of `Updates`, of the engine and of the module's own `rollout`: one after the rollout
    (rewards, what went wrong, number of micro-batches); and one more before it where an estimator reads what a
    forward must find first (old log-probabilities, values).

    Args:
        module: Supplies `rollout`, `score` and the configuration.
        engine: How the trainer's strategy runs forward, backward and step.
    """

    def __init__(self, module: TrainedModule, engine: Engine) -> None:
        self.module = module
        self.engine = engine
        self.objective = module.objective
        self.communicator = engine.communicator()
        self.metrics = RoundMetrics()
        self.updates = Updates(module, engine, self.metrics)
        self._scored_now = False

    def run(self, batch: object, seed: int) -> dict[str, float]:
        """Roll out, estimate, and take every step.

        Args:
            batch: What the data loader gave.
            seed: Seeds the shuffles; different on each rank.

        Returns:
            Metrics, equal on all ranks except for those under ``time/``.

        Raises:
            RLObjectivesError: What went wrong on any rank, on all of them.
        """
        started = time.perf_counter()
        experience, estimate = self._roll_out(batch)
        rolled_out = time.perf_counter()
        self._train(experience, estimate, seed)
        self.metrics.values["time/rollout_seconds"] = rolled_out - started
        self.metrics.values["time/update_seconds"] = time.perf_counter() - rolled_out
        return self.metrics.all()

    def go_on(self, unfinished: UnfinishedRollout) -> dict[str, float]:
        """Take the steps that are left of a rollout, as if it had never been put aside.

        Returns:
            Metrics of the whole rollout; its sampling took no time here.
        """
        started = time.perf_counter()
        self.metrics.go_on(unfinished.metrics)
        unfinished.metrics = self.metrics
        unfinished.random.restore()
        self._take_steps(unfinished)
        self.metrics.values["time/rollout_seconds"] = 0.0
        self.metrics.values["time/update_seconds"] = time.perf_counter() - started
        return self.metrics.all()

    def _train(self, experience: Experience, estimate: Tensor, seed: int) -> None:
        # Old log-probabilities that came with the rollout are of other weights, and no substitute for a pass.
        fresh, turns = self._scored_now, self._turns(experience, seed)
        self._take_steps(UnfinishedRollout(experience, estimate, turns, fresh, self.metrics))

    def _take_steps(self, unfinished: UnfinishedRollout) -> None:
        self.module.unfinished = unfinished
        while unfinished.turns and not self._finished():
            unfinished.begin()
            who, micro_batches = unfinished.turns[0]
            self._updates(who).update(
                unfinished.experience,
                unfinished.estimate,
                micro_batches,
                old_are_current=unfinished.old_are_current,
            )
            unfinished.done()
        if not unfinished.turns:
            self.module.unfinished = None

    def _turns(self, experience: Experience, seed: int) -> list[Turn]:
        """Every update of the rollout, in order."""
        plan = self._plan(experience, self.module.epochs_per_rollout, derive_seed(seed, "shuffle"))
        return [("", micro_batches) for micro_batches in plan]

    def _updates(self, who: str) -> Updates:
        """The kind of update whose turn it is."""
        del who
        return self.updates

    def _plan(self, experience: Experience, epochs: int, seed: int) -> Plan:
        return plan_updates(
            experience.need_rollouts().group_ids.tolist(),
            windows=self.module.windows_per_rollout,
            epochs=epochs,
            micro_batch_size=self.module.micro_batch_size,
            generator=torch.Generator().manual_seed(seed),
        )

    def _finished(self) -> bool:
        limit = self.module.trainer.max_steps
        return limit != -1 and self.module.trainer.global_step >= limit

    # The rollout.

    def _roll_out(self, batch: object) -> tuple[Experience, Tensor]:
        experience, fault = None, Fault()
        with fault.guard():  # the next exchange stops the other ranks too
            with torch.no_grad():
                experience = self.module.rollout(batch)
            self._check(experience)
        reads = (*self.objective.reads(), *self.objective.estimator_reads())
        filled = {"columns of the rollout": _filled_columns(experience, reads)}
        if self._scores_first:
            size = self._count(experience)
            count = exchange({}, self.communicator, fault=fault, micro_batches=size, agreement=filled)
            assert experience is not None  # the exchange has raised otherwise
            experience = self._completed(experience, count.micro_batches)
        estimate = torch.empty(0)
        statistics: dict[str, Stat] = {}
        with fault.guard():
            if experience is not None:
                experience, estimate, statistics = self._judge(experience)
        size = self._count(experience)
        outcome = exchange(statistics, self.communicator, fault=fault, micro_batches=size, agreement=filled)
        assert experience is not None
        if "estimate" in outcome.statistics:
            moments = outcome.statistics.pop("estimate")
            assert isinstance(moments, Moments)
            estimate = normalized_estimate(
                estimate,
                moments,
                experience.need_rollouts(),
                experience.layout,
                token_level=self.objective.estimator.token_level,
            )
        self.metrics.report(outcome.statistics)
        return self._completed(experience, outcome.micro_batches), estimate

    def _check(self, experience: Experience) -> None:
        """Refuse a rollout that lacks what this round must have, before any rank goes on."""
        experience.need_rollouts()

    def _count(self, experience: Experience | None) -> int:
        """Micro-batches in one pass over the rollout."""
        return 0 if experience is None else -(-len(experience) // self.module.micro_batch_size)

    def _judge(self, experience: Experience) -> tuple[Experience, Tensor, dict[str, Stat]]:
        """The experience with what an estimator adds to it, the estimate, and what is reported of the rollout."""
        estimator = self.objective.estimator
        rollouts = self._rollouts(experience)
        check_rollouts_read(self.objective, rollouts)
        raw = estimator.estimate(rollouts)
        estimate = raw.to(experience.device)
        statistics: dict[str, Stat] = dict(reward_metrics(rollouts, estimator, estimate=raw))
        statistics.update(group_metrics(rollouts, estimator, estimate=raw))
        statistics.update(length_metrics(rollouts, self.module.correct(rollouts)))
        if self.module.normalize_advantages:
            statistics["estimate"] = estimate_moments(
                estimate, rollouts, experience.layout, token_level=estimator.token_level
            )
        return experience, estimate, statistics

    @property
    def _estimates_from_logprobs(self) -> bool:
        """Whether the estimator reads old log-probabilities: for KL-shaped rewards, or importance weights."""
        return "old_logprobs" in self.objective.estimator_reads()

    @property
    def _scores_first(self) -> bool:
        """Whether the estimator reads what a forward may have to find first."""
        return self._estimates_from_logprobs

    def _rollouts(self, experience: Experience) -> Rollouts:
        """The rollouts with the experience's layout and columns, for estimators that look at tokens."""
        rollouts, reads = experience.need_rollouts(), self.objective.estimator_reads()
        names = ["layout", "values", *(name for name in reads if name in COLUMNS)]
        given = {name: getattr(experience, name) for name in names if getattr(rollouts, name, self) is None}
        lacking = {name: column for name, column in given.items() if column is not None}
        own = {name: column for name, column in experience.extra.items() if name in reads}
        if own:
            lacking["extra"] = {**own, **rollouts.extra}
        return dataclasses.replace(rollouts, **lacking) if lacking else rollouts

    # Scoring the whole rollout with the weights it was made with.

    def _completed(self, experience: Experience, count: int) -> Experience:
        """The experience with the old log-probabilities that it lacks, found in ``count`` micro-batches."""
        if not self._needs_old_logprobs(experience):
            return experience
        self._scored_now = True
        return experience.replace(**self._score_all(experience, count, self._scored_columns))

    @property
    def _scored_columns(self) -> tuple[str, str]:
        """What is kept of `score`: its entropies too where a pre-pass may take them from here."""
        reads = self.objective.capabilities.needs_prepass and "entropy" in self.objective.columns()
        return "old_logprobs", "entropy" if reads else ""

    def _needs_old_logprobs(self, experience: Experience) -> bool:
        if experience.old_logprobs is not None:
            return False
        # A single update moves no weights before it: the ratio is 1, and its loss reads the current log-probabilities.
        several = self.module.updates_per_rollout > 1 or self.objective.capabilities.needs_prepass
        return several or (self._estimates_from_logprobs and experience.need_rollouts().old_logprobs is None)

    def _score_all(
        self, experience: Experience, count: int, columns: tuple[str, ...], method: str = "score"
    ) -> dict[str, Tensor]:
        """Columns of every sequence under the current weights, without gradient.

        Args:
            experience: The rollout.
            count: Forwards to run: the largest number of micro-batches on any rank.
            columns: Names for what the method returns, in its order; ``""`` for what is not kept.
            method: Which scoring method of the module to call.
        """
        shape, device, size = experience.layout.shape, experience.device, self.module.micro_batch_size
        found = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in columns if name}
        with replay(self.module):
            for position in range(count):
                rows = list(range(position * size, min((position + 1) * size, len(experience))))
                scores = self.engine.forward(experience.rows(rows) if rows else experience.dummy(), method)
                scores = scores if isinstance(scores, tuple) else (scores,)
                for name, column in zip(columns, scores, strict=False):
                    if column is None:  # on every rank alike: the module has no entropies
                        found.pop(name, None)
                    elif rows and name:
                        found[name][rows] = column.detach().float()
        return found


def _filled_columns(experience: Experience | None, reads: Iterable[str]) -> str:
    """Which optional columns a rollout came with: what is run next depends on it, so ranks must agree.

    Args:
        experience: The rollout; None where it could not be made.
        reads: Columns that the objective reads: which of a user's own count.
    """
    if experience is None:
        return ""
    rollouts = experience.rollouts
    here = [name for name in TOKEN_COLUMNS if getattr(experience, name) is not None]
    given = [] if rollouts is None else [one.name for one in dataclasses.fields(rollouts)]
    there = [f"rollouts.{name}" for name in given if getattr(rollouts, name) is not None]
    own = {**experience.extra, **({} if rollouts is None else rollouts.extra)}.keys() & {*reads}
    return " ".join([*here, *there, *(f"extra.{name}" for name in sorted(own))])
