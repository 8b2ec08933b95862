"""A tiny model, fixed completions and fixed rewards, so that two trainers (or two cuts) see exactly the same data."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

GROUP = 4
WORDS = [f"w{number}" for number in range(28)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "eos_token_id": 1,
            "pad_token_id": 0,
            **overrides,
        }
    )
    built = Qwen2ForCausalLM(config)
    built.warnings_issued = {}
    return built


@functools.cache
def saved() -> str:
    """The same model as a folder, from which TRL makes a reference policy."""
    where = tempfile.mkdtemp(prefix="tiny-")
    built = model()
    built.config.architectures = [type(built).__name__]
    # Not by save_pretrained, which writes on rank 0 alone: every rank has a folder of its own.
    Path(where, "config.json").write_text(built.config.to_json_string(), encoding="utf-8")
    save_file(built.state_dict(), Path(where, "model.safetensors"), metadata={"format": "pt"})
    tokenizer().save_pretrained(where)
    return where


def prompts(count: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{index} w{index + 1} w{index + 2}" for index in range(count)]})


def fixed_rollout(seen: dict[str, int]) -> Any:
    """Completions that depend on the prompt, the place in its group and how often it was sampled; never on ranks."""

    def rollout(batch: list[str], trainer: Any) -> dict[str, Any]:
        start = trainer.accelerator.process_index * len(batch)
        group_size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        ids = []
        for row, prompt in enumerate(batch):
            place = (start + row) % group_size
            generator = random.Random(f"{prompt}/{place}/{seen.get(prompt, 0)}")
            length = generator.randint(1, 7)
            tokens = [generator.randint(3, 31) for _ in range(length)]
            ids.append([*tokens, 1] if generator.random() < 0.7 else tokens)
        # Counted over all ranks: in a later epoch a prompt may come to another rank.
        for prompt in set(gather_object(batch)):
            seen[prompt] = seen.get(prompt, 0) + 1
        encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in batch]
        return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None}

    return rollout


def even(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def short(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [1.0 - 0.1 * len(ids) if ids[0] % 5 else None for ids in completion_ids]


def right(completions: list[str], **_: Any) -> list[float]:
    """One answer of each group; for batches of whole groups on every rank."""
    return [float(row % GROUP == 1) for row in range(len(completions))]


def brief(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [
        (0.5 * (len(ids) < 5) if row % GROUP in (1, 2) else 0.0) if ids[-1] % 7 else None
        for row, ids in enumerate(completion_ids)
    ]


def options(**overrides: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "num_generations": GROUP,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 8,
        "seed": 5,
        **overrides,
    }


def trainer(kind: type, config: Any, **extra: Any) -> Any:
    if extra.pop("generated", False):
        extra.pop("rollout_func", None)
    elif "rollout_func" not in extra:
        extra["rollout_func"] = fixed_rollout({})
    return kind(
        model=extra.pop("model", None) or model(),
        reward_funcs=extra.pop("reward_funcs", [even, short]),
        args=config,
        train_dataset=extra.pop("train_dataset", prompts()),
        processing_class=extra.pop("processing_class", None) or tokenizer(),
        **extra,
    )


def parameters(trained: Any) -> torch.Tensor:
    return torch.cat([one.detach().double().flatten().cpu() for one in trained.model.parameters()])
