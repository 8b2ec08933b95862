"""TRL with GDPO: a small model learns to spell words backward from two rewards on a CPU.

python examples/trl_gdpo.py [--steps 100]

One base class and one line; everything else is TRL.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from examples import spelling
from examples.supervised import make_mediocre_model
from rlobjectives import GDPO, FixedBudget, Objective
from rlobjectives.integrations.trl import ObjectiveMixin

ANSWER_TOKENS = 8


class Trainer(ObjectiveMixin, GRPOTrainer):
    """GRPOTrainer with another objective: each reward standardised by itself, over the whole optimizer step."""

    objective = Objective(estimator=GDPO(weights=(1.0, 1.0)), reduction=FixedBudget(max_tokens=ANSWER_TOKENS))


@torch.no_grad()
def measure(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, float]:
    """Share of held-out words answered right and in the right format: sampled answers (what is trained), and greedy."""
    prompts = [row["prompt"] for row in rows]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    found = {}
    for label, options in (
        ("sampled", {"do_sample": True, "temperature": 1.0}),
        ("greedy", {"do_sample": False}),
    ):
        torch.manual_seed(0)
        ids = model.generate(**batch, max_new_tokens=ANSWER_TOKENS, **options)
        completions = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        right = spelling.correct(prompts, completions, answer=[row["answer"] for row in rows])
        formatted = spelling.bracketed(prompts, completions)
        found[f"correct, {label}"] = sum(right) / len(rows)
        found[f"format, {label}"] = sum(formatted) / len(rows)
    return found


def main() -> None:
    """Make a mediocre model, train it, and print what it can do before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (100)")
    parser.add_argument("--folder", default="runs/trl_gdpo", help="where everything goes (runs/trl_gdpo)")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    if not torch.cuda.is_available():
        torch.set_num_threads(
            1
        )  # so small a model leaves several threads waiting for each other, most of all on a busy CPU

    start = Path(options.folder) / "start"
    if not (start / "config.json").exists():
        make_mediocre_model(start, seed=0, steps=600)
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    held_out = spelling.prompts("held_out")

    config = GRPOConfig(
        output_dir=options.folder,
        num_generations=8,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        max_completion_length=ANSWER_TOKENS,
        max_steps=options.steps,
        learning_rate=1e-3,
        warmup_steps=5,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        reward_funcs=[spelling.correct, spelling.bracketed],
        args=config,
        train_dataset=Dataset.from_list(spelling.prompts("train")),
        processing_class=tokenizer,
    )
    before, began = measure(model, tokenizer, held_out), time.perf_counter()
    trainer.train()
    after = measure(trainer.model, tokenizer, held_out)
    seconds = time.perf_counter() - began
    print(
        f"{options.steps} steps in {seconds:.0f} s; answers to {len(held_out):,} words never seen in training:"
    )
    for name, value in after.items():
        print(f"  {name:17} {before[name]:6.1%} -> {value:6.1%}")


if __name__ == "__main__":
    main()
