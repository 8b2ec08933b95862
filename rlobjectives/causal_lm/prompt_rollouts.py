"""PromptRollouts: prompts in, scored completions out, for a module that holds a language model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlobjectives import statistics as kinds
from rlobjectives.causal_lm import language_models
from rlobjectives.causal_lm.prompts import PromptBatch, own_columns
from rlobjectives.causal_lm.rewards import RewardFunctions
from rlobjectives.causal_lm.sampling import Completions, SamplingOptions, sample_completions
from rlobjectives.causal_lm.scoring import score_sequences
from rlobjectives.causal_lm.self_test import check_policy
from rlobjectives.causal_lm.sharding import is_sharded, whole_weights
from rlobjectives.causal_lm.transcript import Transcript, transcribe
from rlobjectives.distributed import LOCAL, Communicator, synchronize
from rlobjectives.distributed.synchronize import raised_together
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.layouts import PaddedLayout
from rlobjectives.objective import Objective
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Mean, Stat, Sum, measured_values

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.engine import Engine
    from rlobjectives.integrations.lightning.resuming import ResumableRollouts

    class _Base(ResumableRollouts):
        """What stands behind this mixin among a module's bases."""

        def _ready(self) -> Engine: ...

else:
    _Base = object

__all__ = ["PromptRollouts"]


class PromptRollouts(_Base):
    """The sampling half of `CausalLMPolicy`: encode, complete, transcribe, score.

    The module supplies the model, its tokenizer, the reward functions and how to draw.
    """

    model: Any
    tokenizer: Any
    reward_functions: RewardFunctions
    sampling: SamplingOptions
    policy_temperature: float
    micro_batch_size: int
    max_prompt_tokens: int | None
    end_ids: Any
    gather_for_sampling: bool
    self_test: bool
    accuracy_threshold: float
    old_logprobs: str
    has_reference: bool
    last_rollout: Transcript | None
    _reference: list[Any]
    _rollout_statistics: dict[str, Stat]
    behavior_weights: Any
    behavior_metrics: Any
    objective: Objective

    @property
    def marks_truncated(self) -> bool:
        """Whether rollouts say which completions were cut off. Only where something follows them up."""
        return False

    def rollout(self, batch: PromptBatch) -> Experience:
        """Sample completions of a batch of prompts and score them.

        Args:
            batch: This rank's prompts.

        Returns:
            ``len(batch) × num_generations`` sequences, a prompt's completions side by side.
        """
        repeats = batch.num_generations
        greedy = None
        with self.behavior_weights():
            prompt_ids, prompt_mask, completions = self.sample(batch, repeats)
            if "greedy_rewards" in self.objective.estimator_reads():
                *_, greedy = self.sample(batch, greedy=True)
        transcript = self.transcribe(batch, completions, repeats)
        self.last_rollout = transcript
        self._rollout_statistics = {
            "rollout/accuracy": transcript.accuracy(self.accuracy_threshold),
            "rollout/completion_tokens": Mean.of(completions.mask.sum(1).double()),
            "rollout/ended_fraction": Mean.of(transcript.ended.double()),
            "rollout/tokens": Sum.of(prompt_mask.sum().double() + completions.mask.sum()),
            **self.behavior_metrics(),
        }
        layout = PaddedLayout(
            torch.cat([torch.zeros_like(prompt_mask, dtype=torch.bool), completions.mask], 1)
        )
        experience = Experience(
            input_ids=torch.cat([prompt_ids, completions.ids], 1),
            attention_mask=torch.cat([prompt_mask, completions.mask.long()], 1),
            layout=layout,
            rollouts=Rollouts(
                rewards=transcript.rewards.to(self.device),
                reward_names=transcript.reward_names,
                group_ids=torch.tensor(batch.ids, device=self.device).repeat_interleave(repeats),
                layout=layout,
                truncated=~transcript.ended.to(self.device) if self.marks_truncated else None,
                **self._against_greedy(batch, greedy, transcript, repeats),
            ),
            behavior_logprobs=nn.functional.pad(completions.logprobs, (prompt_ids.shape[1], 0)),
            extra=own_columns(self.objective, batch, self.device),
        )
        if self.old_logprobs == "behavior":
            experience.old_logprobs = experience.behavior_logprobs
        if self.has_reference:
            experience.ref_logprobs = self._reference_logprobs(experience)
        return experience

    def unfinished_state(self) -> dict[str, Any]:
        """What is logged of a rollout after its last step, and what callbacks show of it."""
        state: dict[str, Any] = super().unfinished_state()
        state["statistics"] = {
            name: [type(one).__name__, one.row.cpu()] for name, one in self._rollout_statistics.items()
        }
        state["transcript"] = None if self.last_rollout is None else self.last_rollout.state_dict()
        return state

    def load_unfinished_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        super().load_unfinished_state(state)
        self._rollout_statistics = {
            name: getattr(kinds, kind)(row.to(self.device))
            for name, (kind, row) in state["statistics"].items()
        }
        if state["transcript"] is not None:
            self.last_rollout = Transcript.from_state_dict(state["transcript"])

    def sample(
        self, batch: PromptBatch, repeats: int = 1, *, greedy: bool = False
    ) -> tuple[Tensor, Tensor, Completions]:
        """Encode a batch's prompts and complete each of them `repeats` times.

        Where the weights are sharded, ranks sample together: what goes wrong on one of them, such as a prompt that
        is too long, is then raised on all, before they sample and again before they go on.

        Returns:
            Prompt ids and mask ``[n, p]``, and their completions.
        """
        together = Communicator.world() if is_sharded(self.model) else LOCAL
        with raised_together(together):
            ids, mask = self.encode(batch.prompts, repeats)
        with raised_together(together, collectives_inside=True):
            completions = self.complete(ids, mask, greedy=greedy)
        return ids, mask, completions

    def complete(self, prompt_ids: Tensor, prompt_mask: Tensor, *, greedy: bool = False) -> Completions:
        """Complete encoded prompts; override to sample with an inference engine.

        Args:
            prompt_ids: ``[n, p]``, padded on the left.
            prompt_mask: ``[n, p]``, 1 on real tokens.
            greedy: Take the most probable token instead of drawing one.
        """
        end_ids = torch.tensor(self.end_ids, device=self.device)
        return self.complete_with(self.sampling, prompt_ids, prompt_mask, end_ids=end_ids, greedy=greedy)

    def complete_with(
        self,
        options: SamplingOptions,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        end_ids: Tensor,
        greedy: bool = False,
    ) -> Completions:
        """Complete encoded prompts with the module's own model.

        Args:
            options: How to draw.
            prompt_ids: ``[n, p]``, padded on the left.
            prompt_mask: ``[n, p]``, 1 on real tokens.
            end_ids: Ids that end a completion, ``[k]``.
            greedy: Take the most probable token instead of drawing one.
        """
        once = self.gather_for_sampling
        with whole_weights(self.model) if once else contextlib.nullcontext(self.model) as model:
            return sample_completions(
                model,
                prompt_ids,
                prompt_mask,
                options,
                eos_ids=end_ids,
                pad_id=self.tokenizer.pad_token_id,
                greedy=greedy,
                communicator=Communicator.world() if is_sharded(model) and not once else LOCAL,
            )

    def _against_greedy(
        self, batch: PromptBatch, greedy: Completions | None, drawn: Transcript, repeats: int
    ) -> dict[str, Any]:
        """Which rewards are scored, and with greedy answers theirs: a reward that lacks one of the two has neither."""
        if greedy is None:
            return {"scored": drawn.scored.to(self.device)}
        answers = self.transcribe(batch, greedy)
        scored = drawn.scored & answers.scored.repeat_interleave(repeats, 0)
        rewards = torch.where(scored, answers.rewards.repeat_interleave(repeats, 0), 0.0)
        return {"scored": scored.to(self.device), "greedy_rewards": rewards.to(self.device)}

    def _reference_logprobs(self, experience: Experience) -> Tensor:
        reference = self._reference[0].to(self.device)
        parts = [
            score_sequences(reference, experience.rows(rows), temperature=self.policy_temperature)[0]
            for rows in torch.split(torch.arange(len(experience)), self.micro_batch_size)
        ]
        return torch.cat(parts).float()

    # The training step.

    def _ready(self) -> Engine:
        """Set up as ever, and before the first rollout test the model (`check_model`)."""
        first = self._engine is None
        engine = super()._ready()
        if first and self.self_test:
            own = getattr(self.complete, "__func__", None) is PromptRollouts.complete
            check_policy(self, engine, samples=own)
        return engine

    def training_step(self, batch: PromptBatch, batch_idx: int = 0) -> None:
        """One rollout and its optimizer steps, with what people watch about the rollout."""
        started = time.perf_counter()
        super().training_step(batch, batch_idx)
        metrics = measured_values(synchronize(self._rollout_statistics, Communicator.world()))
        metrics["time/tokens_per_second"] = metrics.pop("rollout/tokens") / (time.perf_counter() - started)
        self.log_dict(metrics, batch_size=1)

    def encode(self, prompts: Sequence[Any], repeats: int = 1) -> tuple[Tensor, Tensor]:
        """Token ids and mask of prompts ``[n, p]``, padded on the left, each prompt `repeats` times."""
        ids, mask = language_models.encode_prompts(
            self.tokenizer, list(prompts), max_tokens=self.max_prompt_tokens
        )
        return (
            ids.to(self.device).repeat_interleave(repeats, 0),
            mask.to(self.device).repeat_interleave(repeats, 0),
        )

    def transcribe(self, batch: PromptBatch, completions: Completions, repeats: int = 1) -> Transcript:
        """Text and scores of completions."""
        return transcribe(
            batch,
            completions,
            tokenizer=self.tokenizer,
            end_ids=self.end_ids,
            reward_functions=self.reward_functions,
            repeats=repeats,
        )
