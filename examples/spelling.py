"""Words to spell backward, from reasoning-gym: prompts and rewards.

``sun=`` is to be answered ``[nus]``. The YAML files beside this one name `prompts`, `correct` and `bracketed` by
dotted path.
"""

from __future__ import annotations

import functools
import random
import re
import string
import warnings
from collections.abc import Sequence
from typing import Any

CHARACTERS = string.ascii_lowercase + "=[]"
LETTERS = (3, 5)
HELD_OUT = 512


@functools.cache
def task() -> Any:
    """The ``spell_backward`` task, with words of three to five letters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
        import reasoning_gym

    return reasoning_gym.create_dataset(
        "spell_backward", size=20_000, seed=0, min_word_len=LETTERS[0], max_word_len=LETTERS[1]
    )


@functools.cache
def words() -> tuple[str, ...]:
    """Every word of the task once, in an order that has nothing to do with the alphabet."""
    drawn = {entry["metadata"]["word"]: None for entry in task()}
    found = sorted(word for word in drawn if set(word) <= set(CHARACTERS))
    random.Random(0).shuffle(found)
    return tuple(found)


def prompts(part: str, limit: int | None = None) -> list[dict[str, str]]:
    """Words of one part, as rows for `PromptDataModule`; no word is in both parts.

    Args:
        part: ``"train"``, or ``"held_out"``: words that neither phase of the demo learns from.
        limit: Most rows; None takes all.
    """
    chosen = words()[HELD_OUT:] if part == "train" else words()[:HELD_OUT]
    return [{"prompt": f"{word}=", "answer": word[::-1]} for word in chosen[:limit]]


def correct(
    prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 if reasoning-gym's own verifier accepts the first run of letters in the completion, else 0."""
    del prompts, columns
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        letters = re.search(r"[a-z]+", completion)
        found = task().score_answer(letters.group() if letters else None, {"answer": expected})
        scores.append(1.0 if found == 1.0 else 0.0)
    return scores


def bracketed(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion is letters in square brackets and nothing else, else 0."""
    del prompts, columns
    return [1.0 if re.fullmatch(r"\[[a-z]+\]", completion) else 0.0 for completion in completions]
