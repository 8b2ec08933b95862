"""The half of the mixin that samples: TRL's generation batches with an estimate in place of its advantages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlobjectives.errors import CapabilityError, MissingColumnError
from rlobjectives.integrations.trl.columns import (
    GENERATED_AT,
    GROUP,
    KEPT,
    SAMPLED,
    brought,
    brought_column,
    forward,
    image_columns,
    key,
    not_brought,
    token_layout,
)
from rlobjectives.integrations.trl.facts import is_stale
from rlobjectives.integrations.trl.rollout import Scored, global_rollouts, merge_rounds, other_images, score
from rlobjectives.integrations.trl.scoring import ScoringMixin
from rlobjectives.integrations.trl.together import raise_together
from rlobjectives.layouts import PaddedLayout
from rlobjectives.metrics import group_metrics, length_metrics, reward_metrics
from rlobjectives.statistics import Mean, Stat, Sum, fold

__all__ = ["SamplingMixin", "check_prompt"]


def check_prompt(name: str, columns: Iterable[str]) -> None:
    """Refuse rows without the column that TRL reads prompts from.

    Raises:
        MissingColumnError: Naming the columns there are.
    """
    found = list(columns)
    if "prompt" not in found:
        raise MissingColumnError(
            f"{name} has no column 'prompt', from which TRL reads prompts; it has {', '.join(found) or 'none'}. Rename the "
            "column that holds them: dataset.rename_column(name, 'prompt')."
        )


class SamplingMixin(ScoringMixin):
    """Keeps the reward matrix, asks the estimator, resamples or drops groups without signal.

    Attributes:
        objective: The objective in use.
        dynamic_sampling: ``"off"``, ``"drop"`` or ``"resample"`` groups without signal; None in a class that leaves
            it to the configuration.
        max_resamples: Bound on the extra generation rounds; the same.
        max_empty_rollouts: Generation batches in a row without a counted token that end the run; the same.
    """

    objective: Any = None  # an `ObjectiveLike` in a class body, an `Objective` once constructed
    dynamic_sampling: Any = None
    max_resamples: Any = None
    max_empty_rollouts: Any = None
    _tool_mask: list[list[int]] | None = None  # of the completions that TRL has just made
    _makes_prompts: bool = False  # an environment gives them
    _keeps_reference: bool = False  # TRL's trainer does not hand out the reference's log-probabilities
    _sampler_must_say: str = ""  # why the sampler's log-probabilities may not be left out

    def _begin_sampling(self) -> None:
        self._generation = 0
        self._empty_generations: set[int] = set()  # those since a window that was not empty
        self._sampling_stats: dict[str, list[Stat]] = {}
        self._kinds: dict[str, type[Stat]] = {}
        self._evaluation_rows: int | None = None  # still to come, where known

    def _generate(self, prompts: Any) -> tuple[Any, ...]:
        """TRL's completions; which tokens no tool wrote is kept, before that of truncated ones is lost."""
        found = super()._generate(prompts)
        # The third thing is that mask, or None; RLOO, which has no tools, gives three in all.
        self._tool_mask = found[2] if len(found) > 3 else None
        return found

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Keep what TRL is about to forget; `_watch_rewards` keeps the matrix."""
        mask, self._tool_mask = self._tool_mask, None
        sizes = [len(ids) for ids in completion_ids_list] if mask is None else [sum(row) for row in mask]
        self._lengths = torch.tensor(sizes, device=self.args.device)
        reads = brought(self.objective)
        if reads:
            raise_together(not_brought(inputs, completion_ids_list, reads))
        self._brought = {name: brought_column(inputs, one) for name, one in reads.items()}
        self._seen = True
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    @contextmanager
    def _watch_rewards(self) -> Iterator[None]:
        """Keep the matrix as TRL gets it, with whatever a subclass makes of it on the way.

        Raises:
            CapabilityError: If a subclass makes one without this class.
        """
        before = self._calculate_rewards
        self._seen = False

        def kept(*args: Any, **kwargs: Any) -> Tensor:
            self._rewards = before(*args, **kwargs)
            if not self._seen:
                raise CapabilityError(
                    f"{type(self).__name__}._calculate_rewards does not call super()._calculate_rewards(...), which notes "
                    "what the objective reads. Call it and change what it returns."
                )
            return self._rewards

        with self._replaced("_calculate_rewards", kept):
            yield

    @contextmanager
    def _watch_reference(self) -> Iterator[list[Tensor]]:
        """Keep the log-probabilities of TRL's passes over its completions: the old policy's, then the reference's."""
        passes: list[Tensor] = []
        if not self._keeps_reference:
            yield passes
            return
        before = self._get_per_token_logps_and_entropies

        def kept(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            found = before(*args, **kwargs)
            passes.append(found[0])
            return found

        with self._replaced("_get_per_token_logps_and_entropies", kept):
            yield passes

    @contextmanager
    def _replaced(self, name: str, method: Any) -> Iterator[None]:
        """Another method in place of this object's own, for a while."""
        own = vars(self).get(name)
        setattr(self, name, method)
        try:
            yield
        finally:
            if own is None:
                delattr(self, name)
            else:
                setattr(self, name, own)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generation batch with our estimate in place of its advantages.

        Raises:
            MissingColumnError: If the rows have no prompt.
        """
        if inputs and not self._makes_prompts:
            check_prompt("a batch", inputs[0])
        mode = "train" if self.model.training else "eval"
        output, scored = self._sample(inputs, mode)
        rounds = 0
        if mode == "train" and self.dynamic_sampling != "off":
            assert scored.alive is not None
            signal = scored.alive
            while (
                self.dynamic_sampling == "resample" and rounds < self.max_resamples and not bool(signal.all())
            ):
                rounds += 1
                again, rescored = self._sample(inputs, mode)
                assert rescored.alive is not None
                raise_together(other_images(output, again, image_columns(self)))
                taken = rescored.alive & ~signal
                output = merge_rounds(output, again, self._local(taken), self.processing_class.pad_token_id)
                signal = signal | taken
            self._count_sampling(scored.alive, signal, rounds)
            output[KEPT] = self._local(signal)
        if mode == "train":
            self._generation += 1
        return output

    def _sample(self, inputs: Any, mode: str) -> tuple[dict[str, Any], Scored]:
        with self._watch_rewards(), self._watch_reference() as passes:
            output = super()._generate_and_score_completions(inputs)
        if self._keeps_reference and self.args.beta:
            if len(passes) != 2:
                raise CapabilityError(
                    f"{type(self).__name__} made {len(passes)} passes over its completions; expected the old policy's and "
                    "the reference's. Use ObjectiveGRPOTrainer, which hands both out."
                )
            output["ref_per_token_logps"] = passes[1]
        if self._sampler_must_say:
            raise_together(self._silent_sampler(output))
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        self._rows, self._group_size = output["completion_mask"].shape[0], group_size
        layout = token_layout(output)
        for name, column in self._brought.items():
            if column is not None:
                width = (
                    layout.shape[1] - column.shape[1] if column.dim() > 1 else 0
                )  # TRL may pad to a multiple
                output[key(name)] = torch.nn.functional.pad(column.to(layout.device), (0, width))
        self._keep_logprobs(output, mode)
        start, everywhere = self._rows * self.accelerator.process_index, self._rewards.shape[0]
        genuine = everywhere if mode == "train" else self._genuine_rows(everywhere)
        rollouts = global_rollouts(
            self._rewards,
            self.reward_func_names,
            group_size,
            layout,
            self.accelerator,
            columns=self._estimator_columns(output),
            genuine=genuine,
        )
        if group_size < self.objective.capabilities.min_group_size:  # evaluation only; said at set-up
            output["advantages"] = None
            return output, Scored(rollouts, rollouts.rewards[:, 0], None)
        scored = score(rollouts, self.objective.estimator)
        rows = torch.arange(start, start + self._rows, device=rollouts.rewards.device)
        if genuine < everywhere:
            output[KEPT] = (rows < genuine).to(layout.device)
        # Rows that only fill up the batch borrow the last one's numbers; no token of theirs counts.
        estimate = scored.estimate[rows.clamp_max(genuine - 1)]
        output["advantages"] = (
            estimate[:, : layout.shape[1]] if self.objective.estimator.token_level else estimate
        )
        output[GROUP] = rows // group_size + self._generation * (everywhere // group_size)
        output[GENERATED_AT] = torch.tensor(self.state.global_step)
        self._report_rewards(scored, mode, self._response_lengths(output, layout)[:genuine])
        return output, scored

    def _silent_sampler(self, output: dict[str, Any]) -> str | None:
        """What to say of a sampler that owes log-probabilities, or None."""
        if output.get("sampling_per_token_logps") is not None:
            return None
        return (
            f"rollout_func returned logprobs = None, but with {self._sampler_must_say} the objective's importance "
            'ratio needs those of the distribution that sampled. Return "logprobs", one list per completion, one number per '
            "token, of what was really sampled from; or sample without that."
        )

    def _genuine_rows(self, everywhere: int) -> int:
        """How many rows of an evaluation batch are data; accelerate fills up the last one from the beginning."""
        if self._evaluation_rows is None:
            return everywhere
        genuine = min(everywhere, self._evaluation_rows)
        self._evaluation_rows -= genuine
        return genuine or everywhere

    def _keep_logprobs(self, output: dict[str, Any], mode: str) -> None:
        """Log-probabilities under the weights that sampled, where TRL leaves them out and something reads them."""
        needs, stale = self.objective.capabilities, is_stale(self.args) and mode == "train"
        behavior = "behavior_logprobs" in needs.reads and output.get("sampling_per_token_logps") is None
        # The pre-pass takes them if it needs nothing else of the forward.
        prepass = mode == "train" and needs.needs_prepass and "entropy" not in self.objective.columns()
        shaped = "old_logprobs" in self.objective.estimator_reads()
        if output.get("old_per_token_logps") is None and (stale or behavior or prepass or shaped):
            size = self.args.per_device_train_batch_size if mode == "train" else None
            with torch.no_grad():
                logprobs, _, _ = forward(self, self.model, output, entropy=False, batch_size=size)
            output["old_per_token_logps" if stale else SAMPLED] = logprobs

    def _estimator_columns(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Columns that the estimator reads, of this rank."""
        old = output.get("old_per_token_logps", output.get(SAMPLED))
        sampler = output.get("sampling_per_token_logps")
        made = {
            "old_logprobs": old,
            "ref_logprobs": output.get("ref_per_token_logps"),
            "behavior_logprobs": old if sampler is None else sampler,
        }
        found = {name: made.get(name, output.get(key(name))) for name in self.objective.estimator_reads()}
        return {name: column for name, column in found.items() if column is not None}

    def _local(self, per_group: Tensor) -> Tensor:
        """This rank's sequences of a fact about global groups."""
        start = self._rows * self.accelerator.process_index
        rows = torch.arange(start, start + self._rows, device=per_group.device)
        return per_group[rows // self._group_size]

    # What people watch about rewards

    def _response_lengths(self, output: dict[str, Any], layout: PaddedLayout) -> Tensor:
        """Tokens of all ranks' responses but for their tools', those that are masked for being truncated included."""
        own = layout.token_counts()
        masked = output["completion_mask"].sum(1) == 0
        own = torch.where(masked, self._lengths.to(own), own)
        return own if self.accelerator.num_processes == 1 else self.accelerator.gather(own)

    def _report_rewards(self, scored: Scored, mode: str, lengths: Tensor) -> None:
        estimator, estimate = self.objective.estimator, scored.estimate
        stats = reward_metrics(scored.rollouts, estimator, estimate=estimate)
        constant = stats.get("reward/constant_group_fraction")
        old = self._metrics[mode].get("frac_reward_zero_std")
        if old:  # TRL's own judges the sum of raw rewards, or the batch; ours judges the groups' advantages
            old[-1] = float(constant.value) if isinstance(constant, Mean) else old[-1]
        stats |= group_metrics(scored.rollouts, estimator, estimate=estimate, lengths=lengths)
        self._add_stats(mode, stats | length_metrics(scored.rollouts, lengths=lengths))
        if self.args.log_completions:
            self._log_advantages(scored)

    def _log_advantages(self, scored: Scored) -> None:
        """Our estimate (before any whitening over the window) in the table of completions."""
        estimate, layout = scored.estimate, scored.rollouts.tokens("The table of completions")
        token_level = self.objective.estimator.token_level
        if estimate.dim() > (len(layout.shape) if token_level else 1):
            estimate = estimate[..., 0]
        if token_level:
            estimate = layout.segment_sum(estimate) / layout.token_counts().clamp_min(1.0)
        column = estimate.tolist()
        column += [0.0] * (self._rewards.shape[0] - len(column))
        logged = self._logs["advantages"]
        for _ in range(min(len(column), len(logged))):
            logged.pop()
        logged.extend(column)

    def _count_sampling(self, before: Tensor, after: Tensor, rounds: int) -> None:
        self._add_stats(
            "train",
            {
                "sampling/resampled_group_fraction": Mean.of((after & ~before).double()),
                "sampling/dropped_group_fraction": Mean.of((~after).double()),
                "sampling/extra_rounds": Sum.of(torch.tensor(float(rounds))),
            },
        )

    def _add_stats(self, mode: str, stats: dict[str, Stat]) -> None:
        # Every rank sees the global batch, so one rank's word is enough.
        for name, stat in stats.items():
            mine = stat if self.accelerator.process_index == 0 else type(stat).identity(stat.row.device)
            self._sampling_stats.setdefault(f"{mode}:{name}", []).append(mine)
            self._kinds[name] = type(stat)

    def _take_sampling_stats(self, mode: str) -> dict[str, Stat]:
        mine = [name for name in self._sampling_stats if name.startswith(f"{mode}:")]
        taken = {name.split(":", 1)[1]: self._sampling_stats.pop(name) for name in mine}
        return {name: fold(type(stats[0]), stats) for name, stats in taken.items()}
