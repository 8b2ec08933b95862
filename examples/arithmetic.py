"""Sums of single digits from reasoning-gym: prompts, rewards and a character tokenizer.

`demo_gdpo.yaml` names `prompts`, `correct` and `bracketed` by dotted path.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-=[]"
TERMS = 2


@functools.cache
def task(seed: int = 0) -> Any:
    """The ``chain_sum`` task: sums and differences of two digits, such as ``4 - 9``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
        import reasoning_gym

    return reasoning_gym.create_dataset(
        "chain_sum", size=4_000, seed=seed, min_terms=TERMS, max_terms=TERMS, min_digits=1, max_digits=1
    )


def prompts(part: str, limit: int | None = None) -> list[dict[str, str]]:
    """Sums of one part, as rows for `PromptDataModule`.

    The training part holds each different sum once; the held-out part is another draw of the task, in the task's
    own frequencies. There are only two hundred sums of two digits, so held-out sums are not unseen sums: what the
    held-out part measures is how much of the task has been learned, not how it generalises.

    Args:
        part: ``"train"`` or ``"held_out"``.
        limit: Most rows; None takes all that the task generates.
    """
    rows = [
        {"prompt": f"{entry['metadata']['expression'].replace(' ', '')}=", "answer": entry["answer"]}
        for entry in task(seed=0 if part == "train" else 1)
    ]
    if part == "train":
        rows = list({row["prompt"]: row for row in rows}.values())
    return rows[:limit]


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
