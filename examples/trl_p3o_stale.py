"""TRL with P3O on stale samples: every generation batch is used for several optimizer steps, twice over.

python examples/trl_p3o_stale.py [--objective p3o] [--steps 40]

P3O measures how far the samples have gone stale (`p3o/ess`) over the whole optimizer step, before its first loss:
the adapter runs that pass, and where the weights have not moved since sampling it costs nothing.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig

from examples import spelling
from examples.supervised import make_mediocre_model
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer


def main() -> None:
    """Train on stale samples and print how stale they were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objective", default="p3o", help="any name of `rlobjectives algorithms` (p3o)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (40)")
    parser.add_argument("--folder", default="runs/trl_gdpo", help="shared with trl_gdpo.py (runs/trl_gdpo)")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    if not torch.cuda.is_available():
        torch.set_num_threads(
            1
        )  # so small a model leaves several threads waiting for each other, most of all on a busy CPU

    start = Path(options.folder) / "start"
    if not (start / "config.json").exists():
        make_mediocre_model(start, seed=0, steps=600)
    config = GRPOConfig(
        output_dir=options.folder,
        num_generations=8,
        per_device_train_batch_size=32,
        steps_per_generation=4,  # four optimizer steps to a generation batch ...
        num_iterations=2,  # ... and all of that twice
        gradient_accumulation_steps=1,
        max_completion_length=8,
        max_steps=options.steps,
        learning_rate=5e-4,
        max_grad_norm=1.0,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ObjectiveGRPOTrainer(
        objective=options.objective,
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=[spelling.correct, spelling.bracketed],
        args=config,
        train_dataset=Dataset.from_list(spelling.prompts("train")),
        processing_class=AutoTokenizer.from_pretrained(start, padding_side="left"),
    )
    trainer.remove_callback(PrinterCallback)  # the table below says what matters
    trainer.train()
    show(trainer.state.log_history)


def show(history: list[dict[str, Any]]) -> None:
    """A line a step: the age of the samples goes from fresh to stale and back; and the reward before and after."""
    print("step  age  ess     ratio std  kl to sampler  reward")
    rewards: list[float] = []
    for entry in history:
        if "loss/total" not in entry:
            continue
        step = int(entry["step"]) - 1
        if "reward" in entry:
            rewards.append(entry["reward"])  # of a generation batch; logged when it is sampled
        ess, drift = (
            f"{entry[name]:.4f}" if name in entry else "  -   " for name in ("p3o/ess", "p3o/behavior_kl")
        )
        print(
            f"{step:4}  {step % 8:3}  {ess}  {entry.get('policy/ratio_std', float('nan')):9.4f}  {drift:>13}  {rewards[-1]:6.3f}"
        )
    print(f"mean reward of a generation batch: {rewards[0]:.3f} -> {rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
