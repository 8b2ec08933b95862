"""One round: train on one rollout, through its epochs, windows and micro-batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlobjectives.distributed import Fault, GradientScale, replay
from rlobjectives.distributed.synchronize import exchange
from rlobjectives.estimators import group_metrics, length_metrics, reward_metrics
from rlobjectives.estimators.whitening import whiten
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.plan import plan_updates
from rlobjectives.integrations.lightning.randomness import derive_seed
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Maximum, Mean, Moments, Stat
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import ObjectiveOutput, Window

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.engine import Engine
    from rlobjectives.integrations.lightning.mixin import ObjectiveMixin

__all__ = ["Round"]


class Round:
    """One rollout and the optimizer steps taken on it. Lives for one ``training_step``.

    Collectives, beside those of the engine and of the module's own `rollout`: one after the rollout (rewards, what
    went wrong, number of micro-batches), one to open each window, one to summarise it; and one integer before each
    pre-pass that has to run a forward.

    Args:
        module: Supplies `rollout`, `score` and the configuration.
        engine: How the trainer's strategy runs forward, backward and step.
    """

    def __init__(self, module: ObjectiveMixin, engine: Engine) -> None:
        self.module = module
        self.engine = engine
        self.objective = module.objective
        self.communicator = engine.communicator()
        self.scale = GradientScale(averaged_ranks=engine.data_ranks)
        self.metrics = _Metrics()
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
        rollouts = experience.need_rollouts()
        generator = torch.Generator().manual_seed(derive_seed(seed, "shuffle"))
        updates = plan_updates(
            rollouts.group_ids.tolist(),
            windows=self.module.windows_per_rollout,
            epochs=self.module.epochs_per_rollout,
            micro_batch_size=self.module.micro_batch_size,
            generator=generator,
        )
        for position, micro_batches in enumerate(updates):
            if self._finished():
                break
            self._update(experience, estimate, micro_batches, weights_unchanged=position == 0)
        self.metrics.values["time/rollout_seconds"] = rolled_out - started
        self.metrics.values["time/update_seconds"] = time.perf_counter() - rolled_out
        return self.metrics.values

    def _finished(self) -> bool:
        limit = self.module.trainer.max_steps
        return limit != -1 and self.module.trainer.global_step >= limit

    # The rollout.

    def _roll_out(self, batch: object) -> tuple[Experience, Tensor]:
        experience, estimate, fault = None, torch.empty(0), Fault()
        statistics: dict[str, Stat] = {}
        try:
            with torch.no_grad():
                experience = self.module.rollout(batch)
            rollouts = _with_layout(experience)
            estimate = self.objective.estimator.estimate(rollouts).to(experience.device)
            statistics.update(reward_metrics(rollouts, self.objective.estimator))
            statistics.update(group_metrics(rollouts) | length_metrics(rollouts))
            if self.module.normalize_advantages:
                mask = experience.layout.mask if self.objective.estimator.token_level else None
                statistics["estimate"] = Moments.of(estimate, mask)
        except Exception as error:  # kept: the exchange raises it, and stops the other ranks too
            fault.note(error)
        size = self.module.micro_batch_size
        count = 0 if experience is None else -(-len(experience) // size)
        outcome = exchange(statistics, self.communicator, fault=fault, micro_batches=count)
        assert experience is not None  # the exchange has raised otherwise
        if "estimate" in outcome.statistics:
            moments = outcome.statistics.pop("estimate")
            assert isinstance(moments, Moments)
            estimate = whiten(estimate, moments, ddof=1, epsilon=1e-8)
        self.metrics.report(outcome.statistics)
        if self._needs_old_logprobs(experience):
            experience = experience.replace(old_logprobs=self._score_all(experience, outcome.micro_batches))
            self._scored_now = True
        return experience, estimate

    def _needs_old_logprobs(self, experience: Experience) -> bool:
        if experience.old_logprobs is not None:
            return False
        # A single update moves no weights before it: the ratio is 1, and its loss reads the current log-probabilities.
        return self.module.updates_per_rollout > 1 or self.objective.capabilities.needs_prepass

    def _score_all(self, experience: Experience, count: int) -> Tensor:
        """Log-probabilities of every sequence under the current weights, without gradient."""
        logprobs = torch.zeros(experience.layout.shape, dtype=torch.float32, device=experience.device)
        size = self.module.micro_batch_size
        with replay(self.module):
            for position in range(count):
                rows = list(range(position * size, min((position + 1) * size, len(experience))))
                found = self._score_frozen(experience.rows(rows) if rows else experience.dummy())
                if rows:
                    logprobs[rows] = found.float()
        return logprobs

    def _score_frozen(self, micro_batch: Experience) -> Tensor:
        logprobs, _ = self.engine.forward(micro_batch)
        result: Tensor = logprobs.detach()
        return result

    # One optimizer step.

    def _update(
        self, experience: Experience, estimate: Tensor, plan: list[list[int]], *, weights_unchanged: bool
    ) -> None:
        share = self._share(experience, [row for rows in plan for row in rows])
        micro_batches = [(share.rows(local), estimate[rows]) for local, rows in _positions(plan, experience)]
        # Old log-probabilities that came with the rollout are of other weights, and no substitute for a pass.
        window = self._open(share, micro_batches, reuse=weights_unchanged and self._scored_now)
        if window.empty:
            self.metrics.report({"optim/skipped_fraction": Mean.of(torch.ones(1))}, update=True)
            return
        outputs = [
            self._accumulate(window, *pair, last=position == window.micro_batches - 1)
            for position, pair in enumerate(self._padded(window, share, micro_batches, estimate))
        ]
        self.metrics.add(window.summarize(outputs), self.objective.metric_kinds())
        norm = self.engine.step(self.module.single_optimizer(), self.module.gradient_clip_val)
        self.module.step_schedulers()
        self.metrics.report(
            {"optim/grad_norm": Mean.of(norm.reshape(1)), "optim/skipped_fraction": Mean.of(torch.zeros(1))},
            update=True,
        )

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
        scored: list[Tensor | None] = [None] * len(micro_batches)
        if needs_prepass and reuse:
            scored = [micro_batch.old_logprobs for micro_batch, _ in micro_batches]
        elif needs_prepass:
            count = exchange({}, self.communicator, micro_batches=len(micro_batches)).micro_batches
            passes = [micro_batch for micro_batch, _ in micro_batches]
            passes += [share.dummy()] * (count - len(passes))
            started = time.perf_counter()
            with replay(self.module):
                scored = [self._score_frozen(micro_batch) for micro_batch in passes]
            self.metrics.values.setdefault("time/prepass_seconds", 0.0)
            self.metrics.values["time/prepass_seconds"] += time.perf_counter() - started
        for (micro_batch, rows), logprobs in zip(micro_batches, scored, strict=False):
            builder.add(estimate=rows, layout=micro_batch.layout)
            if logprobs is not None:
                builder.add_prepass(_tokens(micro_batch, logprobs))
        return builder.freeze()

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
            shape = dummy.layout.shape if token_level else (1, *estimate.shape[1:])
            yield dummy, estimate.new_zeros(shape)

    def _accumulate(
        self, window: Window, micro_batch: Experience, rows: Tensor, *, last: bool
    ) -> ObjectiveOutput:
        advantages = window.advantages(rows, micro_batch.layout)
        with self.engine.micro_batch(last=last):
            logprobs, entropy = self.engine.forward(micro_batch)
            output = window.loss(_tokens(micro_batch, logprobs, entropy=entropy, advantages=advantages))
            self.engine.backward(output.loss * self.scale.factor)
        return output


class _Metrics:
    """Metrics of a round: the mean over its updates, or the largest, for what is a maximum in each of them."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def report(self, statistics: Mapping[str, Stat], *, update: bool = False) -> None:
        """Take in statistics that are already merged over ranks."""
        found: dict[str, float] = {}
        for name, stat in statistics.items():
            if bool(stat.measured):
                found.update({label: float(number) for label, number in stat.report(name).items()})
        if update:
            self.add(found, {})
        else:
            self.values.update(found)

    def add(self, numbers: Mapping[str, float], kinds: Mapping[str, type[Stat]]) -> None:
        """Take in the numbers of one update."""
        for name, number in numbers.items():
            seen = self._seen.get(name, 0)
            before = self.values.get(name, number)
            if kinds.get(name) is Maximum:
                self.values[name] = max(before, number)
            else:
                self.values[name] = before + (number - before) / (seen + 1)
            self._seen[name] = seen + 1


def _with_layout(experience: Experience) -> Rollouts:
    """The rollouts with the experience's layout and values, for estimators that look at tokens."""
    rollouts = experience.need_rollouts()
    if rollouts.layout is not None:
        return rollouts
    values = experience.values if rollouts.values is None else rollouts.values
    return dataclasses.replace(rollouts, layout=experience.layout, values=values)


def _positions(plan: list[list[int]], experience: Experience) -> Iterator[tuple[list[int], Tensor]]:
    """Each micro-batch's rows, counted in the window and in the rollout."""
    start = 0
    for rows in plan:
        yield (
            list(range(start, start + len(rows))),
            torch.as_tensor(rows, dtype=torch.long, device=experience.device),
        )
        start += len(rows)


def _tokens(
    micro_batch: Experience,
    logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    advantages: Tensor | None = None,
) -> TokenBatch:
    return TokenBatch(
        logprobs=logprobs,
        layout=micro_batch.layout,
        advantages=advantages,
        old_logprobs=micro_batch.old_logprobs,
        behavior_logprobs=micro_batch.behavior_logprobs,
        ref_logprobs=micro_batch.ref_logprobs,
        teacher_logprobs=micro_batch.teacher_logprobs,
        entropy=entropy,
    )
