"""Options that must be the same on every rank, compared in one exchange."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from rlobjectives.descriptions import described

__all__ = ["checksum", "joined", "other_options", "split"]

_LONGEST_VALUE = 300
_BETWEEN, _IS = "\x1e", "\x1f"  # the separators of records and units


def joined(options: Mapping[str, object]) -> str:
    """Options and their values as one text; strings stay as they are, anything else is described."""
    words = {
        name: option if isinstance(option, str) else described(option) for name, option in options.items()
    }
    text = _BETWEEN.join(f"{name}{_IS}{word}" for name, word in sorted(words.items()))
    return text.encode("utf-8", "backslashreplace").decode()  # a string may hold what UTF-8 does not


def split(text: str) -> dict[str, str]:
    """The inverse of `joined`."""
    pairs = (entry.partition(_IS) for entry in text.split(_BETWEEN) if entry)
    return {name: word for name, _, word in pairs}


def checksum(text: str) -> float:
    """A number that stands for a text in an exchange of numbers."""
    return float(zlib.crc32(text.encode()))


def other_options(texts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """A sentence for each option that differs: its name, and every value with the ranks that have it.

    Args:
        texts: What `joined` gave on each rank.
        ranks: Their numbers.

    Example:
        >>> other_options([joined({"seed": 1}), joined({"seed": 2}), joined({"seed": 1})], [0, 1, 2])
        ['seed is 1 on ranks 0, 2, and 2 on rank 1']
    """
    found = [split(text) for text in texts]
    sentences = []
    for name in sorted({name for one in found for name in one}):
        holders: dict[str | None, list[int]] = {}
        for rank, one in zip(ranks, found, strict=True):
            holders.setdefault(one.get(name), []).append(rank)
        if len(holders) == 1:
            continue
        start = _first_difference([word for word in holders if word is not None])
        values = [f"{_shown(word, start)} on {_ranks(members)}" for word, members in holders.items()]
        sentences.append(f"{name} is {', and '.join(values)}")
    return sentences


def _first_difference(words: Sequence[str]) -> int:
    place = 0
    for letters in zip(*words, strict=False):
        if len(set(letters)) > 1:
            break
        place += 1
    return place


def _shown(word: str | None, start: int) -> str:
    if word is None:
        return "absent"
    if len(word) <= _LONGEST_VALUE:
        return word
    first = max(0, start - _LONGEST_VALUE // 3)
    piece = word[first : first + _LONGEST_VALUE]
    return f"{'…' * bool(first)}{piece}{'…' * (first + _LONGEST_VALUE < len(word))}"


def _ranks(members: Sequence[int]) -> str:
    return f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"
