"""Sums of single digits from reasoning-gym: prompts, rewards and a character tokenizer.

`demo_gdpo.yaml` names `prompts`, `correct` and `bracketed` by dotted path.
"""

from __future__ import annotations

import functools
import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-=[]"
TERMS = 2
_HELD_OUT_SHARE = 4  # one sum in four is held out


@functools.cache
def task() -> Any:
    """The ``chain_sum`` task: sums and differences of two digits, such as ``4 - 9``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
        import reasoning_gym

    return reasoning_gym.create_dataset(
        "chain_sum", size=4_000, seed=0, min_terms=TERMS, max_terms=TERMS, min_digits=1, max_digits=1
    )


def prompts(part: str, limit: int | None = None) -> list[dict[str, str]]:
    """Different sums of one part, as rows for `PromptDataModule`.

    Training and held-out sums are disjoint, and more than that: a sum and its reordering (3+2, 2+3) are in the
    same part, so that no held-out sum was rewarded in another order either. There are only two hundred sums of
    two digits, so the supervised phase, which teaches all of them badly, has seen the held-out ones too.

    Args:
        part: ``"train"``, ``"held_out"`` or ``"all"``.
        limit: Most rows; None takes all that the task generates.
    """
    found: dict[str, dict[str, str]] = {}
    for entry in task():
        expression = entry["metadata"]["expression"].replace(" ", "")
        terms = sorted(re.findall(r"[+-]\d", f"+{expression}"))
        held_out = zlib.crc32("".join(terms).encode()) % _HELD_OUT_SHARE == 0
        if part == "all" or held_out == (part == "held_out"):
            found.setdefault(expression, {"prompt": f"{expression}=", "answer": entry["answer"]})
        if limit is not None and len(found) >= limit:
            break
    return list(found.values())


def correct(
    prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 if reasoning-gym's own verifier accepts the first integer in the completion, else 0."""
    del prompts, columns
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        number = re.search(r"-?\d+", completion)
        found = task().score_answer(number.group() if number else None, {"answer": expected})
        scores.append(1.0 if found == 1.0 else 0.0)
    return scores


def bracketed(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion is one integer in square brackets and nothing else, else 0."""
    del prompts, columns
    return [1.0 if re.fullmatch(r"\[-?\d+\]", completion) else 0.0 for completion in completions]


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token a character, 18 in all, where `AutoTokenizer` finds it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocabulary = {text: number for number, text in enumerate([*CHARACTERS, *names.values()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
