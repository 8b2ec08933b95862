"""Columns: what parts may read of tokens and of rollouts, each said once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rlobjectives.checks import check_choice, shown, suggestion
from rlobjectives.errors import CapabilityError

__all__ = ["COLUMNS", "LOGPROBS", "Column", "Read", "column", "read"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `TokenBatch` or `Rollouts`: one of the library's, or one of your own.

    A part declares the columns it reads in ``reads``. One of your own needs no more than that: give its numbers in
    ``TokenBatch(extra=…)`` or ``Rollouts(extra=…)``, and read them with ``need``.

    Args:
        name: What it is called everywhere: an identifier.
        meaning: What its numbers are, with their unit.
        per: ``"token"`` for one number per token, shaped like the layout's mask; ``"sequence"`` for one per sequence.
        gradient: Whether losses may have a slope in it.
        flags: The column that says where this one is known, or nothing.
        source: Who gives it, in words, for messages.
        remedy: What to do where nobody does, for messages.
        follows: The column without which there is none of this one, or nothing.

    Raises:
        CapabilityError: If the name is no identifier, or ``per`` is neither.

    Example:
        >>> from rlobjectives import PolicyCorrection, TokenWeights
        >>> class ByConfidence(PolicyCorrection):
        ...     reads = (Column("confidence", "how sure the tool was, in [0, 1]"),)
        ...     def token_weights(self, tokens, context):
        ...         return TokenWeights(weight=tokens.need("confidence", self), keep=tokens.layout.mask)
        >>> [one.column.name for one in ByConfidence().declared_reads()]
        ['confidence']
    """

    name: str
    meaning: str = ""
    per: Literal["token", "sequence"] = "token"
    gradient: bool = False
    flags: str = ""
    source: str = ""
    remedy: str = ""
    follows: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise CapabilityError(
                f"A column is called {self.name!r}; expected an identifier, such as 'confidence'."
            )
        check_choice(f"per of column {self.name!r}", self.per, ("token", "sequence"))


def _table() -> Iterator[Column]:
    yield Column("logprobs", "log-probability under the policy being trained, in nats", gradient=True)
    yield Column("old_logprobs", "the same under the policy that starts this round of updates")
    yield Column(
        "advantages",
        "how much better than expected, in reward units",
        source="ready advantages",
        remedy="Compute them with an estimator (GRPO)",
    )
    yield Column(
        "behavior_logprobs",
        "log-probability under the policy that sampled",
        flags="behavior_known",
        source="the sampler's log-probabilities",
        remedy="Let the sampler return log-probabilities",
    )
    yield Column(
        "ref_logprobs",
        "log-probability under the frozen reference policy",
        source="a reference policy",
        remedy="Keep a frozen reference",
    )
    yield Column(
        "teacher_logprobs",
        "log-probability under a teacher",
        flags="teacher_known",
        source="a teacher",
        remedy="Give a teacher",
    )
    yield Column("entropy", "entropy of the policy, in nats", gradient=True)
    yield Column(
        "behavior_kl",
        "divergence from the policy that sampled, over the vocabulary",
        gradient=True,
        source="the sampler's logits for the exact divergence",
        remedy="Let the sampler return them",
        follows="behavior_logprobs",
    )
    yield Column(
        "ref_kl",
        "divergence from the reference policy, over the vocabulary",
        gradient=True,
        source="the reference policy's logits for the exact divergence",
        remedy="Keep a frozen reference",
        follows="ref_logprobs",
    )
    yield Column(
        "teacher_divergence",
        "divergence from a teacher, over the vocabulary",
        gradient=True,
        flags="teacher_known",
        source="a teacher's logits",
        remedy="Give a teacher",
        follows="teacher_logprobs",
    )
    yield Column(
        "values",
        "value of the state before the token, in reward units",
        gradient=True,
        source="values of a critic",
        remedy="Add a critic",
    )
    yield Column("old_values", "the same from the critic that judged the rollout", follows="values")
    yield Column("returns", "targets of the values, in reward units", follows="values")
    yield Column("token_rewards", "rewards given at tokens, on top of those of sequences")
    yield Column(
        "squared_probs", "sum of the squared probabilities of all tokens", source="whole distributions"
    )
    for name, meaning, source in (
        ("session_ids", "session of each sequence, for credit across turns", "sessions"),
        ("truncated", "whether the sequence was cut off", ""),
        ("bootstrap_values", "value of the state after a truncated sequence", "values of a critic"),
        ("greedy_rewards", "rewards of the greedy answer to the prompt", "rewards of greedy answers"),
        ("prompt_tokens", "counted tokens of the whole prompt group", "prompt groups"),
        ("prompt_sequences", "sequences of the whole prompt group", "prompt groups"),
    ):
        yield Column(name, meaning, "sequence", source=source)


COLUMNS: Mapping[str, Column] = {one.name: one for one in _table()}
"""The library's columns, by name."""
LOGPROBS = tuple(name for name in COLUMNS if name.endswith("logprobs"))
"""Columns of log-probabilities, which are never above 0."""
TAUGHT = tuple(name for name, one in COLUMNS.items() if one.flags == "teacher_known")
"""Columns that a teacher gives."""
OLD_NEEDS: Mapping[str, str] = {
    "needs_critic": "values",
    "needs_behavior_logprobs": "behavior_logprobs",
    "needs_ref_logprobs": "ref_logprobs",
    "needs_teacher": TAUGHT[0],
    "uses_reward_components": "",
}
"""Flags of `Capabilities` of the version before, and the column that each meant."""
OLD_FACTS: Mapping[str, str] = {
    "has_critic": "values",
    "has_reference": "ref_logprobs",
    "has_teacher": TAUGHT[0],
}
"""The same of `TrainerFacts`."""


@dataclass(frozen=True, slots=True)
class Read:
    """That a part reads a column.

    Attributes:
        column: Which.
        required: Whether the part cannot do without; otherwise it is read where it is there.
        unknown: Whether it may be unknown at some tokens, because the part says what happens there.
    """

    column: Column
    required: bool = True
    unknown: bool = False

    def __or__(self, other: Read) -> Read:
        """Both readers of one column together."""
        return Read(self.column, self.required or other.required, self.unknown or other.unknown)


def column(named: str | Column) -> Column:
    """A column of the library by its name, or one of your own as it is.

    Raises:
        CapabilityError: If the library has none of that name.
    """
    if isinstance(named, Column):
        known = COLUMNS.get(named.name)
        if known is not None and known != named:
            raise CapabilityError(
                f"The library has a column {named.name!r} itself ({known.meaning}). Read that one by its name, or give "
                "yours another."
            )
        return named
    if not isinstance(named, str):
        raise CapabilityError(f"{shown(named)} is no column; expected a name, a Column or read(...).")
    if named not in COLUMNS:
        raise CapabilityError(
            f"There is no column {named!r}.{suggestion(named, COLUMNS)} A column of your own is declared whole: "
            f"Column({named!r}, 'what it means', per='token')."
        )
    return COLUMNS[named]


def read(named: str | Column | Read, *, required: bool = True, unknown: bool = False) -> Read:
    """One entry of a part's ``reads``.

    Args:
        named: A column of the library by its name, or a `Column` of your own.
        required: Whether the part cannot do without it.
        unknown: Whether the part says what happens at tokens where it is not known.

    Returns:
        The column with both.

    Raises:
        CapabilityError: If the library has no column of that name.

    Example:
        >>> read("token_rewards", required=False).column.per
        'token'
    """
    return named if isinstance(named, Read) else Read(column(named), required, unknown)


def merged(reads: Iterable[Read]) -> dict[str, Read]:
    """The reads of several parts by column, the library's first, in the order of its table.

    Raises:
        CapabilityError: If two parts mean different columns by one name.
    """
    found: dict[str, Read] = {}
    for one in reads:
        name = one.column.name
        if name in found and found[name].column != one.column:
            raise CapabilityError(
                f"Two parts read a column {name!r} and mean different ones: {found[name].column} and {one.column}. "
                "Give one of them another name, or both the same Column."
            )
        found[name] = found[name] | one if name in found else one
    order = [*(name for name in COLUMNS if name in found), *(name for name in found if name not in COLUMNS)]
    return {name: found[name] for name in order}
