"""What is left of a rollout between two of its optimizer steps, as a part of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlobjectives.distributed import RandomState
from rlobjectives.integrations.lightning.experience import TOKEN_COLUMNS, Experience
from rlobjectives.integrations.lightning.updates import RoundMetrics
from rlobjectives.layouts import PaddedLayout
from rlobjectives.rollouts import Rollouts
from rlobjectives.statistics import Stat

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.plan import Turn

__all__ = ["UnfinishedRollout", "unstorable"]

_PLAIN = (bool, int, float, str, type(None))


@dataclasses.dataclass
class UnfinishedRollout:
    """A rollout in use on this rank, at the beginning of its next optimizer step.

    A rollout cannot be made again: the weights that sampled it have moved. So a checkpoint between two of its steps
    holds it, and a resumed run goes on with the very next step.

    Attributes:
        experience: Every sequence, with what has been found about it.
        estimate: The raw advantages.
        turns: The steps that are left: who is updated, and the micro-batches.
        old_are_current: Whether the next step is the first, and old log-probabilities are of the current weights.
        metrics: What has been reported so far.
        random: The generators where the next step begins.
        inside_step: The optimizer has begun to move the weights: nothing can go on from there.
    """

    experience: Experience
    estimate: Tensor
    turns: list[Turn]
    old_are_current: bool
    metrics: RoundMetrics
    random: RandomState = dataclasses.field(default_factory=RandomState)
    inside_step: bool = False

    def begin(self) -> None:
        """Note where the generators stand before a step."""
        self.random = RandomState()

    def done(self) -> None:
        """Count a step that was taken, or skipped because nothing counted."""
        self.turns = self.turns[1:]
        self.old_are_current = self.inside_step = False

    def trouble(self) -> str:
        """Why this rollout cannot be stored; empty if it can."""
        if self.inside_step:
            return "it was made inside an optimizer step, where some weights have moved and others have not"
        return unstorable(self.experience)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors on the CPU, for a file that is read with ``weights_only=True``."""
        experience = self.experience
        rollouts = experience.need_rollouts()
        columns = {name: getattr(experience, name) for name in TOKEN_COLUMNS}
        state = {
            "columns": {name: column for name, column in columns.items() if column is not None},
            "mask": experience.layout.mask,
            "facts": experience.layout.facts,
            "extra": experience.extra,
            "rewards": rollouts.rewards,
            "reward_names": list(rollouts.reward_names or ()),
            "scored": rollouts.scored,
            "group_ids": rollouts.group_ids,
            "estimate": self.estimate,
            "turns": self.turns,
            "old_are_current": self.old_are_current,
            "metrics": self.metrics.state_dict(),
            "random": self.random.state_dict(),
        }
        return {name: _on_cpu(value) for name, value in state.items()}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], kinds: Mapping[str, type[Stat]], device: torch.device
    ) -> UnfinishedRollout:
        """The inverse of `state_dict`.

        Args:
            state: What was stored.
            kinds: The statistic behind each metric of a window.
            device: Where to train.
        """
        layout = PaddedLayout(state["mask"], **state["facts"])
        rollouts = Rollouts(
            rewards=state["rewards"],
            reward_names=tuple(state["reward_names"]) or None,
            scored=state["scored"],
            group_ids=state["group_ids"],
        )
        experience = Experience(layout=layout, rollouts=rollouts, extra=state["extra"], **state["columns"])
        return cls(
            experience=experience.to(device),
            estimate=state["estimate"].to(device),
            turns=[(who, rows) for who, rows in state["turns"]],
            old_are_current=state["old_are_current"],
            metrics=RoundMetrics.from_state_dict(state["metrics"], kinds),
            random=RandomState.from_state_dict(state["random"]),
        )


def unstorable(experience: Experience) -> str:
    """Why an experience cannot stand in a checkpoint that is read without running code; empty if it can.

    Example:
        >>> mask = torch.tensor([[False, True]])
        >>> ids = torch.zeros(1, 2, dtype=torch.long)
        >>> unstorable(Experience(input_ids=ids, attention_mask=mask, layout=PaddedLayout(mask), extra={"a": [object()]}))
        "its rollout has extra['a'], which holds other things than tensors, numbers and text"
    """
    if type(experience) is not Experience:
        return f"its rollout is a {type(experience).__name__}, of which only an Experience can be stored"
    odd = next((name for name, column in experience.extra.items() if not _is_plain(column)), None)
    return (
        ""
        if odd is None
        else f"its rollout has extra[{odd!r}], which holds other things than tensors, numbers and text"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    return isinstance(value, Tensor) or type(value) in _PLAIN


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A copy, since the view of a larger tensor would be stored with all of it.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(one) for one in value)
    return value
