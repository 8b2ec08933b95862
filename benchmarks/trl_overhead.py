"""What the mixin costs: the step of stock TRL against ours, same loss, same data, interleaved.

python benchmarks/trl_overhead.py [--rounds 5] [--hidden 128] [--layers 4] [--tokens 128]

Both trainers get the same fixed completions, so a step is TRL's own scoring of them, forward, backward and SGD;
nothing is generated. Times are CPU seconds of this process (wall time on a GPU), a run of each in turn; memory is
the peak of live tensor bytes in a run of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.timing import peak_bytes
from rlobjectives.integrations.trl import ObjectiveGRPOTrainer
from tests.integrations.trl import tiny

GROUP = 8


def clock() -> float:
    """CPU time of this process, or wall time behind a synchronisation on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Steps(TrainerCallback):
    """Stops a trainer's clock at every optimizer step."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time."""
        self.marks.append(clock())

    def seconds(self) -> list[float]:
        """Time from step to step."""
        return [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]


def rollout(tokens: int) -> Any:
    """Completions of full length, and of half of it."""

    def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
        source = torch.Generator().manual_seed(trainer.state.global_step)
        ids = [
            torch.randint(3, 31, (tokens if row % 2 else tokens // 2,), generator=source).tolist()
            for row in range(len(prompts))
        ]
        encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None}

    return sample


def build(kind: type, options: argparse.Namespace, steps: int) -> tuple[Any, Steps]:
    """A trainer and its clock."""
    extra = {} if kind is ObjectiveGRPOTrainer else {"loss_type": "dapo"}
    chosen = (
        {"objective": {"name": "dapo", "policy_loss": {"clip_high": 0.2}}}
        if kind is ObjectiveGRPOTrainer
        else {}
    )
    config = GRPOConfig(
        **tiny.options(
            output_dir=tempfile.mkdtemp(),
            num_generations=GROUP,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=options.accumulation,
            max_completion_length=options.tokens,
            learning_rate=1e-3,
            max_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1000,
            **extra,
        )
    )
    model = tiny.model(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.tokens + 16,
    )
    trainer = tiny.trainer(kind, config, model=model, rollout_func=rollout(options.tokens), **chosen)
    steps_clock = Steps()
    trainer.add_callback(steps_clock)
    return trainer, steps_clock


def run(kind: type, options: argparse.Namespace, steps: int) -> tuple[list[float], int]:
    """Seconds of each step but the first two, and the peak of memory that one step adds."""
    trainer, steps_clock = build(kind, options, steps)
    trainer.train()
    short, _ = build(kind, options, 1)
    return steps_clock.seconds()[1:], peak_bytes(short.train)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each trainer, in turn (5)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run (8)")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8_192)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ratios: list[float] = []
    memory: list[float] = []
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(options.rounds):
        stock, stock_peak = run(GRPOTrainer, options, options.steps)
        ours, our_peak = run(ObjectiveGRPOTrainer, options, options.steps)
        ratios.append(statistics.median(ours) / statistics.median(stock))
        memory.append(our_peak / stock_peak)
        times["stock"] += stock
        times["ours"] += ours
    print(
        json.dumps(
            {
                "step of stock TRL, ms": round(1e3 * statistics.median(times["stock"]), 1),
                "step with the mixin, ms": round(1e3 * statistics.median(times["ours"]), 1),
                "time ratio, median": round(statistics.median(ratios), 4),
                "time ratio, range": [round(min(ratios), 4), round(max(ratios), 4)],
                "memory ratio, median": round(statistics.median(memory), 4),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
