"""A tokenizer with one token a character, for models that are made here."""

from __future__ import annotations

from pathlib import Path


def save_tokenizer(folder: Path, characters: str) -> None:
    """Write it where `AutoTokenizer` finds it: the characters in order, then ``<pad>``, ``<bos>`` and ``<eos>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocabulary = {text: number for number, text in enumerate([*characters, *names.values()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
