"""What every token layout can do, and the facts about sequences that travel with it."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlobjectives.checks import check_device, check_integral, check_mask, check_shape, check_tensor
from rlobjectives.distributed.communicator import LOCAL, Communicator
from rlobjectives.errors import MissingColumnError, ShapeError
from rlobjectives.layouts.scan import Piece, reverse_scan
from rlobjectives.masking import select

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SequenceFacts", "TokenLayout", "check_layout", "with_prompts"]

L = TypeVar("L", bound="TokenLayout")

SequenceFacts = Mapping[str, Tensor]
"""Per-sequence columns ``[n]`` that are about more than the tokens at hand."""


class TokenLayout(abc.ABC):
    """Where tokens lie, which of them count, and to which sequence each belongs.

    Token maths is written once, for tensors shaped like `mask`; a layout supplies the few
    operations that must know about sequences. Layouts are immutable.

    A layout also carries facts about its sequences that the tokens at hand cannot tell:

    * ``sequence_mask``: False for a sequence that this rank must not count: a dummy row that
      only keeps ranks in step. (Context-parallel ranks above 0 are handled by the window.)
    * ``total_tokens``: counted tokens of the whole sequence, when this rank holds only a shard.
    * ``prompt_tokens`` and ``prompt_sequences``: counted tokens and sequences of the whole prompt
      group inside the window (`with_prompts`).

    Attributes:
        mask: Boolean, shaped like the tokens. True where the token carries loss (an action).
        facts: The per-sequence columns above, by name.
        is_shard: Whether the tokens at hand are known to be only a part of each sequence; the window says so
            under context parallelism.
    """

    mask: Tensor
    facts: dict[str, Tensor]
    is_shard: bool = False

    def _set(self, mask: Tensor, facts: SequenceFacts) -> None:
        check_mask("layout.mask", mask)
        for name, fact in facts.items():
            check_tensor(f"layout.facts[{name!r}]", fact)
            check_device(f"layout.facts[{name!r}]", fact, mask.device, "layout.mask")
        self.mask = mask
        self.facts = {name: fact.detach() for name, fact in facts.items()}

    def _check_facts(self) -> None:
        for name, fact in self.facts.items():
            check_shape(f"layout.facts[{name!r}]", fact, (self.num_sequences,), "one entry per sequence")

    @property
    @abc.abstractmethod
    def num_sequences(self) -> int:
        """Number of sequences ``n``, fully masked ones included."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Positions of the longest sequence (a bound that needs no look at the device)."""

    @abc.abstractmethod
    def expand(self, per_sequence: Tensor) -> Tensor:
        """Give every token the number of its sequence.

        Args:
            per_sequence: ``[n]``.

        Returns:
            Shaped like `mask`. Padding gets some finite neighbour's number; the mask decides.
        """

    @abc.abstractmethod
    def segment_sum(self, per_token: Tensor) -> Tensor:
        """Sum the *counted* tokens of each sequence, selecting so that masked NaN stays out.

        Args:
            per_token: Shaped like `mask`.

        Returns:
            ``[n]`` in the dtype given; of integers and flags, int64. Differentiable.
        """

    @property
    @abc.abstractmethod
    def shortest(self) -> int:
        """Positions of the shortest sequence, read without a look at the device."""

    @abc.abstractmethod
    def first(self, per_token: Tensor) -> Tensor:
        """What stands at the first position of each sequence, counted or not.

        Args:
            per_token: Shaped like `mask`, with or without a dimension of columns behind.

        Returns:
            ``[n]`` or ``[n, k]``. A sequence without any position gives some neighbour's number, or 0.
        """

    @abc.abstractmethod
    def cumulative_sum(self, per_token: Tensor) -> Tensor:
        """Sum of the counted tokens of the same sequence up to and including each position.

        Args:
            per_token: Shaped like `mask`.

        Returns:
            Float64, shaped like `mask`. A masked position has the sum of what came before it.
        """

    @abc.abstractmethod
    def pieces(self, limit: int | None = None) -> Iterator[Piece]:
        """Runs of whole neighbouring sequences, so that long batches are worked on in small parts.

        Args:
            limit: Positions a piece holds at most, unless one sequence alone is longer; by default
                what suits the device.
        """

    def blocks(self, limit: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Cut the layout into runs of whole neighbouring sequences, all of them, the empty ones included.

        Args:
            limit: Positions a block holds at most, unless one sequence alone is longer; by default
                what suits the device.

        Yields:
            Which sequences, and where they lie along the first dimension of a token tensor: what `block` takes.
            One block of everything, unless a layout knows better.
        """
        del limit
        yield slice(0, self.num_sequences), slice(0, self.shape[0])

    def block(self, sequences: slice, tokens: slice) -> Self:
        """The layout of one of `blocks`, facts included; its mask is a view."""
        part = copy.copy(self)
        part._set(self.mask[tokens], {name: fact[sequences] for name, fact in self.facts.items()})
        return part

    @abc.abstractmethod
    def rows(self: L, index: Tensor | slice) -> L:
        """The layout of the chosen sequences, facts included. Packed layouts repack."""

    @abc.abstractmethod
    def rows_of(self, per_token: Tensor, index: Tensor | slice) -> Tensor:
        """The tokens of the chosen sequences, laid out as `rows` lays them.

        Args:
            per_token: Shaped like `mask`, with or without a dimension of columns behind.
            index: Which sequences, in which order.
        """

    def with_facts(self, **facts: Tensor) -> Self:
        """A copy that carries more facts (or other values of those it has)."""
        twin = copy.copy(self)
        twin._set(self.mask, {**self.facts, **facts})
        twin._check_facts()
        return twin

    def with_mask(self, mask: Tensor) -> Self:
        """A copy in which other tokens count; facts are kept."""
        self.check("mask", mask)
        twin = copy.copy(self)
        twin._set(mask, self.facts)
        return twin

    def reverse_scan(self, delta: Tensor, decay: float | Tensor, tail: Tensor | None = None) -> Tensor:
        """The recurrence ``yₜ = δₜ + dₜ·y_next(t)`` over the counted tokens of each sequence.

        ``next(t)`` is the next *counted* token: a masked token is skipped without a decay, whatever it
        holds, and carries the y of the next counted one. A blocked scan, linear in the tokens, in float64
        inside; there is no loop over tokens and no power that could underflow.

        Args:
            delta: δ, shaped like `mask`. A NaN at a counted token is loud: it may reach other sequences.
            decay: d, one number or shaped like `mask`.
            tail: y beyond the last token of each sequence, ``[n]``; 0 by default.

        Returns:
            y in the dtype of ``delta``, shaped like `mask`. Scope: one sequence, of which this rank must hold
            every token. Gradient: none.
        """
        self.check("delta", delta)
        if isinstance(decay, Tensor):
            self.check("decay", decay)
            decay = decay.detach()
        if tail is not None:
            check_shape("tail", tail, (self.num_sequences,), "one entry per sequence")
            tail = tail.detach()
        return reverse_scan(delta.detach(), decay, self.mask, self.pieces(), tail)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every token tensor in this layout."""
        return tuple(self.mask.shape)

    @property
    def device(self) -> torch.device:
        """Device of the mask."""
        return self.mask.device

    def check(self, name: str, per_token: Tensor) -> None:
        """Raise a `ShapeError` unless the tensor is shaped like the mask, and on its device."""
        check_shape(name, per_token, self.shape, "the shape of layout.mask")
        check_device(name, per_token, self.mask.device, "layout.mask")

    def check_columns(self, name: str, per_token: Tensor) -> None:
        """Raise a `ShapeError` unless the tensor begins like the mask; one dimension may follow."""
        check_tensor(name, per_token)
        columns = tuple(per_token.shape[self.mask.dim() :])[:1]
        check_shape(name, per_token, (*self.shape, *columns), "the shape of layout.mask")
        check_device(name, per_token, self.mask.device, "layout.mask")

    def select(self, per_token: Tensor, other: float = 0.0) -> Tensor:
        """The counted tokens' values, and ``other`` everywhere else (never a product, and nothing broadcasts)."""
        self.check("per_token", per_token)
        return select(per_token, self.mask, other)

    def local_counts(self) -> Tensor:
        """Counted tokens of each sequence on this rank, float64 ``[n]``."""
        return self.segment_sum(self.mask.to(torch.float64))

    def token_counts(self) -> Tensor:
        """Counted tokens of each whole sequence, float64 ``[n]``, also when this rank has a shard."""
        total = self.facts.get("total_tokens")
        if total is None and self.is_shard:
            raise MissingColumnError(
                "This layout holds a context-parallel shard of each sequence and no 'total_tokens', so nobody here "
                "knows how long the sequences are. Give layout.with_facts(total_tokens=full_token_counts("
                "layout.local_counts(), communicator))."
            )
        return self.local_counts() if total is None else total.to(torch.float64)

    def as_shard(self) -> Self:
        """A copy that knows its tokens are only a part of each sequence, so it never takes theirs for all."""
        part = copy.copy(self)
        part.is_shard = True
        return part

    def sequence_mask(self) -> Tensor:
        """Which sequences this rank counts, bool ``[n]``."""
        mask = self.facts.get("sequence_mask")
        if mask is None:
            return torch.ones(self.num_sequences, dtype=torch.bool, device=self.device)
        return mask.bool()

    def fact(self, name: str, remedy: str) -> Tensor:
        """A fact that must be there, as float64 ``[n]``.

        Raises:
            MissingColumnError: Naming the fact and the ``remedy``.
        """
        if name not in self.facts:
            raise MissingColumnError(f"The layout carries no {name!r}. {remedy}")
        return self.facts[name].to(torch.float64)

    def with_prompts(self, group_ids: Tensor) -> Self:
        """A copy that knows the size of each prompt group, for prompt-level reductions.

        Call it on the layout that holds every sequence of the window's prompts (before cutting
        it into micro-batches with `rows`).

        Args:
            group_ids: Integer prompt of each sequence, ``[n]``.
        """
        check_integral("group_ids", group_ids)
        check_shape("group_ids", group_ids, (self.num_sequences,), "one id per sequence")
        check_device("group_ids", group_ids, self.mask.device, "layout.mask")
        return with_prompts([self], [group_ids])[0]


def check_layout(layout: object) -> None:
    """Raise a `ShapeError` unless this is a layout: a bare mask does not say where sequences begin."""
    if not isinstance(layout, TokenLayout):
        raise ShapeError(
            f"layout is {layout.__class__.__name__}; expected a layout. Give PaddedLayout(mask), or "
            "PackedLayout(cu_seqlens, mask)."
        )


def with_prompts(
    layouts: Sequence[L], groups: Sequence[Tensor], communicator: Communicator = LOCAL
) -> list[L]:
    """Copies that know the size of each prompt group, for prompt-level reductions.

    Args:
        layouts: All of this rank that hold sequences of the window's prompts.
        groups: Integer prompt of each sequence, for each of them.
        communicator: The ranks that a group may spread over, each with as many sequences as the others.
    """
    ids, index = torch.unique(torch.cat(list(groups)), return_inverse=True)
    counts = torch.cat(
        [torch.stack([one.token_counts(), one.sequence_mask().to(torch.float64)], dim=1) for one in layouts]
    )
    sizes = counts.new_zeros(ids.numel(), 2).index_add_(0, index, counts)
    if communicator.world_size > 1:
        # Never more ids than sequences, and every rank has as many sequences: rows of one length.
        rows = counts.new_full((counts.shape[0], 3), -1.0)
        rows[: ids.numel()] = torch.cat([ids.double().unsqueeze(1), sizes], dim=1)
        gathered = communicator.gather(rows.flatten()).reshape(-1, 3).to(sizes.device)
        everywhere, where = torch.unique(gathered[:, 0], return_inverse=True)
        totals = sizes.new_zeros(everywhere.numel(), 2).index_add_(0, where, gathered[:, 1:])
        sizes = totals[torch.searchsorted(everywhere, ids.double())]
    tokens, sequences = (
        torch.split(column, [len(one) for one in groups]) for column in sizes[index].unbind(1)
    )
    return [
        layout.with_facts(prompt_tokens=mine, prompt_sequences=siblings)
        for layout, mine, siblings in zip(layouts, tokens, sequences, strict=True)
    ]
