"""One optimizer step of a TRL trainer: its micro-batches, their window, and what is left to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlobjectives._moved import moved_names
from rlobjectives.distributed import LOCAL, Communicator
from rlobjectives.distributed.replay import RandomState
from rlobjectives.integrations.dropout import largest_dropout
from rlobjectives.integrations.trl.columns import (
    GENERATED_AT,
    GROUP,
    SAMPLED,
    forward,
    token_batch,
    token_layout,
)
from rlobjectives.layouts import PaddedLayout
from rlobjectives.layouts.base import with_prompts
from rlobjectives.objective import Objective
from rlobjectives.statistics import Stat
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import ObjectiveOutput, Report, Window

if TYPE_CHECKING:
    from rlobjectives.integrations.trl.host import Host

__all__ = ["MicroBatch", "StepWindow", "largest_dropout", "open_window"]


@dataclass(slots=True)
class MicroBatch:
    """TRL's columns of one forward, with the estimate's rows and the layout of the counted tokens."""

    inputs: dict[str, Any]
    layout: PaddedLayout

    @property
    def estimate(self) -> Tensor:
        """The estimator's rows, which travel under TRL's name for advantages."""
        estimate: Tensor = self.inputs["advantages"]
        return estimate


class StepWindow:
    """An open window and the micro-batches that still have to go through it.

    Args:
        window: Frozen, the same on all ranks.
        micro_batches: Of this rank, in the order the Trainer will ask for them.
    """

    def __init__(self, window: Window, micro_batches: list[MicroBatch]) -> None:
        self.window = window
        self.waiting = deque(micro_batches)
        self.current: MicroBatch | None = None
        self.outputs: list[ObjectiveOutput] = []

    def next(self) -> MicroBatch:
        """Take the next micro-batch."""
        self.current = self.waiting.popleft()
        return self.current

    def loss(
        self, logprobs: Tensor, entropy: Tensor | None, extra: Mapping[str, Stat] | None
    ) -> tuple[Tensor, Report | None]:
        """This micro-batch's share of the loss, and the window's report if it was the last.

        The report is made *before* the last backward: under DeepSpeed that backward already steps the optimizer, and
        a non-finite loss must be an error on all ranks before it does.
        """
        micro = self.current
        assert micro is not None
        advantages = self.window.advantages(micro.estimate, micro.layout)
        tokens = token_batch(
            micro.inputs,
            micro.layout,
            logprobs,
            reads=self.window.objective.reads(),
            advantages=advantages,
            entropy=entropy,
        )
        output = self.window.loss(tokens)
        self.outputs.append(output)
        report = None if self.waiting else self.window.summarize(self.outputs, extra)
        return output.loss, report


def open_window(
    trainer: Host, objective: Objective, batches: list[dict[str, Any]], *, split_groups: bool
) -> StepWindow:
    """Add every micro-batch, run the pre-pass if a loss needs one, and freeze. All ranks call it together.

    Args:
        trainer: Runs the forward of the pre-pass.
        objective: The parts.
        batches: This rank's micro-batches of the step.
        split_groups: Whether a prompt's completions may lie on several ranks.
    """
    ranks = trainer.accelerator.num_processes
    communicator = Communicator.world() if ranks > 1 else LOCAL
    layouts = [token_layout(batch) for batch in batches]
    if "prompt_tokens" in objective.reads():
        groups = [batch[GROUP] for batch in batches]
        layouts = with_prompts(layouts, groups, communicator if split_groups else LOCAL)
    micro_batches = [MicroBatch(batch, layout) for batch, layout in zip(batches, layouts, strict=True)]
    builder = objective.window(communicator)
    prepass: list[TokenBatch] = []
    if objective.capabilities.needs_prepass:
        prepass = _prepass(trainer, micro_batches, objective=objective)
    for position, micro in enumerate(micro_batches):
        builder.add(estimate=micro.estimate, layout=micro.layout)
        if prepass:
            builder.add_prepass(prepass[position])
    return StepWindow(builder.freeze(), micro_batches)


def _prepass(trainer: Host, micro_batches: list[MicroBatch], *, objective: Objective) -> list[TokenBatch]:
    """Columns under the current policy, without gradient, leaving the random state as it was.

    Log-probabilities recomputed at sampling time are taken where the weights have not moved since.
    """
    state, reads = RandomState(), objective.columns()
    entropy, found = "entropy" in reads, []
    with torch.no_grad():
        for micro in micro_batches:
            inputs = micro.inputs
            sampled = inputs.get("old_per_token_logps", inputs.get(SAMPLED))
            fresh = int(inputs[GENERATED_AT]) == trainer.state.global_step
            if sampled is not None and fresh and not entropy:
                logprobs, entropies = sampled, None
            else:
                logprobs, entropies, _ = forward(trainer, trainer.model, inputs, entropy=entropy)
            found.append(
                token_batch(inputs, micro.layout, logprobs, reads=objective.reads(), entropy=entropies)
            )
    state.restore()
    return found


__getattr__ = moved_names(__name__)
