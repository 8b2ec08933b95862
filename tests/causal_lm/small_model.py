"""A tiny language model and tokenizer in a folder, and rewards, for tests of the policy."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.characters import save_tokenizer
from rlobjectives import GDPO, Objective
from rlobjectives.causal_lm import CausalLMPolicy

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
# Prompts of different lengths, so that some are padded.
UNEVEN = ["1+1=", "12+3-4=", "9", "5-5+5-5="]


def save_small_model(folder: Path, *, scale: float = 1.0) -> str:
    """Save a random model whose distribution is far from uniform, so that truncation bites."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=18,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=15,
            bos_token_id=16,
            eos_token_id=17,
            initializer_range=0.2,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(folder)
    save_tokenizer(folder, "0123456789+-=[]")
    return str(folder)


def long_answer(prompts, completions, **columns):
    """Reward: length, up to 1."""
    return [min(1.0, len(text) / 6) for text in completions]


def has_digit(prompts, completions, *, answer, **columns):
    """Reward: whether there is a digit; cannot score an empty completion."""
    return [None if not text else float(any(c.isdigit() for c in text)) for text in completions]


def policy(folder: str, kind: type[CausalLMPolicy] = CausalLMPolicy, **options) -> CausalLMPolicy:
    """A policy on the small model."""
    given = {
        "objective": Objective(estimator=GDPO(weights=(1.0, 0.5))),
        "rewards": [has_digit, long_answer],
        "model_name_or_path": folder,
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
    }
    return kind(**{**given, **options})
