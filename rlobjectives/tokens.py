"""TokenBatch: the facts about tokens that a policy loss reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlobjectives.checks import check_device, check_floating, check_mask
from rlobjectives.columns import COLUMNS as KNOWN
from rlobjectives.errors import MissingColumnError, ShapeError
from rlobjectives.extra import check_extra, missing
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout

__all__ = ["COLUMNS", "WITH_GRADIENT", "TokenBatch", "check_tokens"]


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
        extra: Columns of your own, which a part of yours reads (`Column`), shaped like the mask; they keep their gradient.
            One per sequence, ``[n]``, is a fact of the layout: give it there (`TokenLayout.with_facts`), or here beside a
            padded layout.

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
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layout(self.layout)
        for name in _FLAGS:
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
            object.__setattr__(self, name, column if KNOWN[name].gradient else column.detach())
        self._sort_extra()

    def _sort_extra(self) -> None:
        layout, found, facts = self.layout, {}, {}
        for name, column in check_extra(self.extra, self).items():
            if tuple(column.shape) == layout.shape:
                low = column.dtype in (torch.float16, torch.bfloat16)
                found[name] = column.float() if low else column
            elif tuple(column.shape) == (layout.num_sequences,) and len(layout.shape) > 1:
                facts[name] = column
            else:
                raise ShapeError(
                    f"extra[{name!r}] has shape {list(column.shape)}; expected {list(layout.shape)}, one entry per token. Give a "
                    f"column of {layout.num_sequences} entries, one per sequence, as layout.with_facts({name}=...)."
                )
            check_device(f"extra[{name!r}]", column, layout.device, "layout.mask")
        object.__setattr__(self, "extra", found)
        if facts:
            object.__setattr__(self, "layout", layout.with_facts(**facts))

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.layout.num_sequences

    def known(self, name: str) -> Tensor | None:
        """Where a column is known, bool; None when that is everywhere."""
        flags = KNOWN[name].flags if name in KNOWN else ""
        found: Tensor | None = getattr(self, flags) if flags else None
        return found

    def get(self, name: str) -> Tensor | None:
        """A column of the library or of your own, of tokens or of sequences; None where it was not given."""
        if name in COLUMNS:
            found: Tensor | None = getattr(self, name)
            return found
        return self.extra.get(name, self.layout.facts.get(name))

    def need(self, name: str, reader: object) -> Tensor:
        """A column that a part cannot do without.

        Args:
            name: Of the library's columns or of your own.
            reader: The part, or its name, for the message.

        Raises:
            MissingColumnError: If it was not given.
        """
        column = self.get(name)
        if column is None:
            raise MissingColumnError(missing(name, reader, "TokenBatch", name in COLUMNS))
        return column

    def old(self) -> Tensor:
        """`old_logprobs`, or the detached `logprobs` when the policy has not moved."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def replace(self, **columns: Tensor | TokenLayout | None) -> TokenBatch:
        """A copy with other columns, those of your own among them."""
        own = {name: columns.pop(name) for name in [*columns] if name not in _FIELDS}
        if own:
            columns["extra"] = {**self.extra, **own}  # type: ignore[assignment]
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def block(self, sequences: slice, places: slice) -> TokenBatch:
        """Some neighbouring sequences, one of ``layout.blocks()``; columns are views."""
        return self._each(lambda column: column[places], layout=self.layout.block(sequences, places))

    def detach(self) -> TokenBatch:
        """A copy without any gradient."""
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Tensor], Tensor], **columns: TokenLayout) -> TokenBatch:
        given = {name: getattr(self, name) for name in (*COLUMNS, *_FLAGS)}
        return dataclasses.replace(
            self,
            **{name: change(one) for name, one in given.items() if one is not None},  # type: ignore[arg-type]
            **columns,  # type: ignore[arg-type]
            extra={name: change(one) for name, one in self.extra.items()},
        )


_FIELDS = tuple(one.name for one in dataclasses.fields(TokenBatch))
COLUMNS = tuple(name for name in _FIELDS if name in KNOWN)
"""Every column that is shaped like the mask."""
WITH_GRADIENT = tuple(name for name in COLUMNS if KNOWN[name].gradient)
"""Columns that carry gradient."""
_FLAGS = tuple(dict.fromkeys(KNOWN[name].flags for name in COLUMNS if KNOWN[name].flags))


def check_tokens(tokens: object) -> None:
    """Raise a `ShapeError` unless this is a `TokenBatch`."""
    if not isinstance(tokens, TokenBatch):
        raise ShapeError(
            f"tokens is {type(tokens).__name__}; expected a TokenBatch. Give TokenBatch(logprobs=..., layout=...)."
        )
