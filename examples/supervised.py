"""The demo's first phase: teach a small model to answer, deliberately badly.

Of the answers it learns from, most are wrong and half are badly formatted. It starts mediocre, not blank, and
reinforcement learning has something to select from.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tqdm import tqdm

from examples import spelling
from examples.characters import save_tokenizer

UNCHANGED_FRACTION = 0.4
SWAPPED_FRACTION = 0.25
BADLY_FORMATTED_FRACTION = 0.5
MODEL = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def mediocre_answer(answer: str, source: random.Random) -> str:
    """An answer that is often wrong (not reversed, or two letters swapped) and often badly formatted."""
    letters, draw = list(answer), source.random()
    if draw < UNCHANGED_FRACTION:
        letters.reverse()
    elif draw < UNCHANGED_FRACTION + SWAPPED_FRACTION:
        place = source.randrange(len(letters) - 1)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
    shape = "[{}]"
    if source.random() < BADLY_FORMATTED_FRACTION:
        shape = source.choice(["{}", "[{}", "{}]", "={}"])
    return shape.format("".join(letters))


def make_mediocre_model(folder: Path, *, seed: int, steps: int, batch_size: int = 32) -> None:
    """Train a fresh 0.28 M parameter Llama on mediocre answers and save it with its tokenizer.

    Args:
        folder: Where to save.
        seed: Seeds weights, data order and mistakes.
        steps: Optimizer steps.
        batch_size: Words in a step.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    source = random.Random(seed)  # mistakes, not secrets
    save_tokenizer(folder, spelling.CHARACTERS)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **MODEL, **{f"{name}_token_id": one for name, one in ids.items()}
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    rows = spelling.prompts("train")
    for _ in tqdm(range(steps), desc="supervised", unit="step"):
        chosen = source.choices(rows, k=batch_size)
        texts = [
            f"{row['prompt']}{mediocre_answer(row['answer'], source)}{tokenizer.eos_token}" for row in chosen
        ]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, label in zip(chosen, labels, strict=True):
            label[: 1 + len(row["prompt"])] = -100  # the answer is learned, not the word
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
