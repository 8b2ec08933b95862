"""Experience: the token columns of one rollout, as a plain class that Lightning moves but never casts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlobjectives import tokens
from rlobjectives.checks import suggestion
from rlobjectives.errors import MissingColumnError, ShapeError
from rlobjectives.layouts import PaddedLayout
from rlobjectives.rollouts import Rollouts

__all__ = ["COLUMNS", "TOKEN_COLUMNS", "Experience"]

_FOUND_LATER = ("logprobs", "advantages", "old_values", "behavior_kl", "ref_kl", "teacher_divergence")
COLUMNS = tuple(name for name in tokens.COLUMNS if name not in _FOUND_LATER)
"""Columns of losses that a rollout may come with, or be given before its first update."""
TOKEN_COLUMNS = ("input_ids", "attention_mask", *COLUMNS)
"""Everything in an `Experience` that is shaped like its mask, but for `Experience.extra`."""


class Experience:
    """The sequences of one rollout and everything training reads about them.

    Every token column is shaped like `input_ids` ``[n, t]``, and column ``j`` is about the token ``input_ids[:, j]``
    given the tokens before it. So position 0, which nothing precedes, can never count.

    It is deliberately neither a dataclass nor a mapping. Lightning refuses frozen dataclasses in a batch, and its
    half-precision, DeepSpeed and FSDP plugins cast every float tensor they find in one to bfloat16, which turns a
    log-probability of −10.03 into a ratio of 1.03. An object with a `to` method is moved and not looked into.

    Args:
        input_ids: Token ids, prompt and completion, ``[n, t]``.
        attention_mask: Bool or integer ``[n, t]``, non-zero on real tokens.
        layout: Padded layout ``[n, t]``; its mask is True on the action tokens, those that carry loss.
        rollouts: Rewards and groups of the ``n`` sequences. None in a micro-batch: estimates need whole groups.
        columns: Columns of `TokenBatch`, by name. Log-probabilities of the policy that sampled (``behavior_logprobs``), as
            the sampler saw it, and of a reference or a teacher are the rollout's to give. What is left out and read,
            the trainer finds: ``old_logprobs``, under the policy at the start of this round of updates; ``entropy`` there,
            where an objective reads it before its losses; ``values`` of the critic that the rollout is judged with, if
            there is one; and ``returns``, from the estimator.
        extra: What else the module's `score` reads, and columns of your own that a part reads (`Column`): tensors or lists
            with one entry per sequence in dimension 0.

    Raises:
        ShapeError: If a column, the layout or the rollouts do not describe the same sequences, or position 0
            counts.

    Example:
        >>> from rlobjectives import Rollouts
        >>> ids = torch.tensor([[5, 1, 2], [5, 3, 0]])
        >>> mask = torch.tensor([[False, True, True], [False, True, False]])
        >>> rollouts = Rollouts(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]))
        >>> experience = Experience(input_ids=ids, attention_mask=ids > 0, layout=PaddedLayout(mask), rollouts=rollouts)
        >>> len(experience), experience.rows([1]).input_ids.tolist()
        (2, [[5, 3, 0]])
    """

    def __init__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        layout: PaddedLayout,
        rollouts: Rollouts | None = None,
        extra: Mapping[str, Any] | None = None,
        **columns: Tensor | None,
    ) -> None:
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.layout = layout
        self.rollouts = rollouts
        self.extra = dict(extra or {})
        for name in columns:
            if name not in COLUMNS:
                raise MissingColumnError(
                    f"Experience has no column {name!r}.{suggestion(name, COLUMNS)} A column of your own goes into extra."
                )
        for name in COLUMNS:
            setattr(self, name, columns.get(name))
        self._check_shapes()
        # Read from the device once, here at the data boundary; copies are made without looking again.
        if self.layout.shape[1] and bool(self.layout.mask[:, 0].any()):
            raise ShapeError(
                "experience.layout.mask is True at position 0, whose token has no prefix and so no log-probability. "
                "Columns are aligned with input_ids: the mask is True at the action tokens themselves."
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor | None: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def _check_shapes(self) -> None:
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None:
                self.layout.check(f"experience.{name}", column)
        for name, column in self.extra.items():
            if len(column) != len(self):
                raise ShapeError(
                    f"experience.extra[{name!r}] has {len(column)} entries; expected {len(self)}, one per sequence."
                )
        if self.rollouts is not None and self.rollouts.num_sequences != len(self):
            raise ShapeError(
                f"experience.rollouts has {self.rollouts.num_sequences} sequences; input_ids has {len(self)} rows."
            )

    def __len__(self) -> int:
        """Number of sequences ``n``."""
        return self.layout.num_sequences

    def __repr__(self) -> str:
        return f"Experience(n={len(self)}, t={self.layout.shape[1]})"

    @property
    def device(self) -> torch.device:
        """Device of the token columns."""
        return self.input_ids.device

    def need_rollouts(self) -> Rollouts:
        """The rewards and groups, which a whole rollout must carry.

        Raises:
            MissingColumnError: If there are none.
        """
        if self.rollouts is None:
            raise MissingColumnError(
                "The experience carries no rollouts. Give Experience(rollouts=Rollouts(...))."
            )
        return self.rollouts

    def to(self, device: torch.device | str) -> Experience:
        """A copy on another device; no dtype changes."""

        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: move(one) for name, one in value.items()}
            return value.to(device) if isinstance(value, Tensor) else value

        rollouts = self.rollouts
        if rollouts is not None:
            names = [
                field.name for field in dataclasses.fields(rollouts) if field.name not in ("groups", "layout")
            ]
            layout = rollouts.layout
            if isinstance(layout, PaddedLayout):
                layout = _layout_to(layout, device)
            rollouts = Rollouts(layout=layout, **{name: move(getattr(rollouts, name)) for name in names})
        return self.replace(
            layout=_layout_to(self.layout, device),
            rollouts=rollouts,
            extra=move(self.extra),
            **{name: move(getattr(self, name)) for name in TOKEN_COLUMNS},
        )

    def rows(self, index: Tensor | list[int]) -> Experience:
        """The chosen sequences as a micro-batch: every column, without the rollouts.

        Args:
            index: Positions of the sequences, in the order wanted.
        """
        chosen = torch.as_tensor(index, dtype=torch.long, device=self.device)
        positions = chosen.tolist() if any(isinstance(column, list) for column in self.extra.values()) else []

        def pick(column: Any) -> Any:
            if column is None:
                return None
            return (
                column[chosen] if isinstance(column, Tensor) else [column[position] for position in positions]
            )

        return self.replace(
            layout=self.layout.rows(chosen),
            rollouts=None,
            extra={name: pick(column) for name, column in self.extra.items()},
            **{name: pick(getattr(self, name)) for name in TOKEN_COLUMNS},
        )

    def replace(self, **columns: Any) -> Experience:
        """A copy with other columns, by the constructor's names."""
        changed = copy.copy(self)
        for name, column in columns.items():
            if name not in vars(self):
                raise MissingColumnError(
                    f"Experience has no column {name!r}; it has {', '.join(vars(self))}."
                )
            setattr(changed, name, column)
        changed._check_shapes()  # its own class
        return changed

    def dummy(self) -> Experience:
        """One sequence of which nothing counts, for a rank that has fewer micro-batches than another.

        Its forward and backward keep the ranks' collectives in step; its loss is an exact zero. Uses the first
        sequence, or two tokens of id 0 where there is none.

        Raises:
            MissingColumnError: If there is no sequence and `extra` holds a list, whose entries cannot be made up.
        """
        row = self.rows([0]) if len(self) else self._blank()
        uncounted = torch.zeros(1, dtype=torch.bool, device=self.device)
        facts = {**row.layout.facts, "sequence_mask": uncounted}
        return row.replace(layout=PaddedLayout(torch.zeros_like(row.layout.mask), **facts))

    def _blank(self) -> Experience:
        lists = [name for name, column in self.extra.items() if not isinstance(column, Tensor)]
        if lists:
            raise MissingColumnError(
                f"This rank has no sequence, and a stand-in for extra[{lists[0]!r}] cannot be made up from nothing. "
                "Make extra columns tensors, or give every rank at least one sequence."
            )
        blank: dict[str, Any] = {}
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            blank[name] = None if column is None else column.new_zeros(1, 2)
        blank["attention_mask"] = self.attention_mask.new_ones(1, 2)
        facts = {name: fact.new_zeros(1) for name, fact in self.layout.facts.items()}
        return self.replace(
            layout=PaddedLayout(self.layout.mask.new_zeros(1, 2), **facts),
            rollouts=None,
            extra={name: column.new_zeros(1, *column.shape[1:]) for name, column in self.extra.items()},
            **blank,
        )


def _layout_to(layout: PaddedLayout, device: torch.device | str) -> PaddedLayout:
    return PaddedLayout(
        layout.mask.to(device), **{name: fact.to(device) for name, fact in layout.facts.items()}
    )
