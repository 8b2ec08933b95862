"""TokenBatch: the facts about tokens that a policy loss reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from rlobjectives.checks import check_floating, check_mask
from rlobjectives.errors import MissingColumnError, ShapeError
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout

__all__ = ["COLUMNS", "WITH_GRADIENT", "TokenBatch", "check_tokens"]

COLUMNS = (
    "logprobs",
    "old_logprobs",
    "advantages",
    "behavior_logprobs",
    "ref_logprobs",
    "entropy",
    "teacher_logprobs",
    "behavior_kl",
    "ref_kl",
    "teacher_divergence",
    "values",
    "old_values",
    "returns",
)
"""Every column that is shaped like the mask."""
WITH_GRADIENT = ("logprobs", "entropy", "behavior_kl", "ref_kl", "teacher_divergence", "values")
"""Columns that carry gradient."""

_KNOWN = {
    "behavior_logprobs": "behavior_known",
    "teacher_logprobs": "teacher_known",
    "teacher_divergence": "teacher_known",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Token columns of one micro-batch, all shaped like ``layout.mask``.

    Log-probabilities are at most 0: `Window.summarize` reports what is above, beyond rounding, on all ranks.

    Only `logprobs`, `entropy`, the three divergences and `values` carry gradient; every other column is
    detached here. What a masked token holds never matters.

    A column that is missing at some counted tokens is never guessed: say where it is known. At the
    other places it becomes NaN, which is an error unless a part says what happens there.

    Args:
        logprobs: Log-probability of each token under the policy being trained, in nats, at the
            temperature the tokens were sampled with.
        layout: Where the tokens lie and which of them count.
        advantages: Advantage of each token, from `Window.advantages`.
        old_logprobs: The same under the policy that starts this round of updates. None says that
            the policy has not moved since, so the ratio is exactly 1 (with its gradient).
        behavior_logprobs: The same under the policy that sampled, as the sampler saw it.
        ref_logprobs: The same under the frozen reference policy.
        entropy: Entropy of the policy at each token, in nats.
        teacher_logprobs: The same under a teacher.
        behavior_kl: Divergence of the policy from the one that sampled, over the whole vocabulary, in
            nats (`vocabulary_divergence`). With gradient.
        ref_kl: Divergence of the policy from the reference, over the whole vocabulary, in nats
            (`vocabulary_divergence` with β = 1). With gradient.
        teacher_divergence: Divergence of the policy from a teacher (`vocabulary_divergence`,
            `topk_divergence`), in nats. With gradient.
        values: Value of the state before each token, from the critic being trained, in reward units. With gradient.
        old_values: The same from the critic that the rollout was judged with.
        returns: Targets of the values, from ``estimator.value_targets``, in reward units.
        behavior_known: Bool; where the sampler's log-probabilities are known. None: everywhere.
        teacher_known: Bool; where the teacher's columns are known. None: everywhere.

    Raises:
        ShapeError: If a column is not floating point or not shaped like the mask.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, False]]))
        >>> tokens = TokenBatch(logprobs=torch.tensor([[-1.0, -9.0]]), layout=layout)
        >>> tokens.num_sequences
        1
    """

    logprobs: Tensor
    layout: TokenLayout
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    behavior_kl: Tensor | None = None
    ref_kl: Tensor | None = None
    teacher_divergence: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    behavior_known: Tensor | None = None
    teacher_known: Tensor | None = None

    def __post_init__(self) -> None:
        check_layout(self.layout)
        for name in _KNOWN.values():
            known = getattr(self, name)
            if known is not None:
                self.layout.check(name, known)
                check_mask(name, known)
        for name in COLUMNS:
            column = getattr(self, name)
            if column is None:
                continue
            self.layout.check(name, column)
            check_floating(name, column)
            if column.dtype in (torch.float16, torch.bfloat16):
                column = column.float()
            known = self.known(name)
            if known is not None:
                column = torch.where(known, column, torch.nan)
            object.__setattr__(self, name, column if name in WITH_GRADIENT else column.detach())

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.layout.num_sequences

    def known(self, name: str) -> Tensor | None:
        """Where a column is known, bool; None when that is everywhere."""
        flags: Tensor | None = getattr(self, _KNOWN[name]) if name in _KNOWN else None
        return flags

    def need(self, name: str, reader: str) -> Tensor:
        """A column that ``reader`` cannot do without.

        Raises:
            MissingColumnError: If it was not given.
        """
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise MissingColumnError(
                f"{reader} reads {name}, but the TokenBatch carries none. Give TokenBatch({name}=...)."
            )
        return column

    def old(self) -> Tensor:
        """`old_logprobs`, or the detached `logprobs` when the policy has not moved."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def replace(self, **columns: Tensor | TokenLayout | None) -> TokenBatch:
        """A copy with other columns."""
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def block(self, sequences: slice, places: slice) -> TokenBatch:
        """Some neighbouring sequences, one of ``layout.blocks()``; columns are views."""
        columns = {name: getattr(self, name) for name in (*COLUMNS, *_KNOWN.values())}
        return self.replace(
            layout=self.layout.block(sequences, places),
            **{name: None if column is None else column[places] for name, column in columns.items()},
        )

    def detach(self) -> TokenBatch:
        """A copy without any gradient."""
        columns = {name: getattr(self, name) for name in WITH_GRADIENT}
        return self.replace(
            **{name: None if column is None else column.detach() for name, column in columns.items()}
        )


def check_tokens(tokens: object) -> None:
    """Raise a `ShapeError` unless this is a `TokenBatch`."""
    if not isinstance(tokens, TokenBatch):
        raise ShapeError(
            f"tokens is {type(tokens).__name__}; expected a TokenBatch. Give TokenBatch(logprobs=..., layout=...)."
        )
