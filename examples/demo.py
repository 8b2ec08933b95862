"""`make demo`: a language model learns from two rewards, through the whole path that a large one would take.

A small model is taught to spell words backward, badly (most of its lessons are wrong, half badly formatted), then
trained with GDPO by the command line from `demo_gdpo.yaml`: two ranks, ZeRO-3, on CPUs or GPUs. At the end stand
its scores before and after, on words that it has never seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `examples` is found, wherever this is run from

RUN = Path("runs/demo")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of RL (default: %(default)s)")
    parser.add_argument(
        "--supervised-steps", type=int, default=800, help="steps of the first phase (default: %(default)s)"
    )
    return parser.parse_args()


def hardware() -> dict[str, str]:
    """Trainer options for this machine: two ranks with ZeRO-3 where it has two devices, one process otherwise."""
    import torch

    if torch.cuda.is_available():
        count, accelerator = min(2, torch.cuda.device_count()), "gpu"
    else:
        count, accelerator = min(2, os.cpu_count() or 1), "cpu"
    strategy = "deepspeed_stage_3" if count > 1 else "auto"
    return {"accelerator": accelerator, "devices": str(count), "strategy": strategy}


def train(seed: int, steps: int) -> None:
    """Run the command line on the YAML, in a process of its own."""
    options = {**hardware(), "max_steps": str(steps), "val_check_interval": str(max(1, min(50, steps)))}
    command = [sys.executable, "-m", "rlobjectives.cli", "fit", "--config", "examples/demo_gdpo.yaml"]
    command += [
        f"--seed_everything={seed}",
        *(f"--trainer.{name}={value}" for name, value in options.items()),
    ]
    print(f"\n$ rlobjectives {' '.join(command[3:])}\n", flush=True)
    # Third parties that warn about themselves on every step; their warnings would hide the progress bar.
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning,ignore::SyntaxWarning,ignore::UserWarning"}
    subprocess.run(command, check=True, env={**os.environ, **quiet})  # this repository's own program


def summarize(seconds: float) -> dict[str, Any]:
    """What the run achieved, from the history that the training wrote."""
    history = json.loads((RUN / "history.json").read_text(encoding="utf-8"))
    first, last = history["validation"][0], history["validation"][-1]
    return {
        "objective": history["objective"],
        "world_size": history["world_size"],
        "strategy": history["strategy"],
        "steps": history["steps"],
        "seconds": round(seconds, 1),
        "accuracy_before": first["val/sampled/accuracy"],
        "accuracy_after": last["val/sampled/accuracy"],
        "format_before": first["val/sampled/bracketed"],
        "format_after": last["val/sampled/bracketed"],
        "greedy_accuracy_before": first["val/accuracy"],
        "greedy_accuracy_after": last["val/accuracy"],
        "training_seconds": round(history["seconds"], 1),
    }


def report(summary: dict[str, Any]) -> str:
    """The result as a table."""
    rows = [
        ("accuracy, sampled at temperature 1", "accuracy"),
        ("accuracy, most probable answer", "greedy_accuracy"),
        ("well-formatted answers, sampled", "format"),
    ]
    head = (
        f"{summary['objective']}, {summary['strategy']} on {summary['world_size']} rank(s), "
        f"{summary['steps']} steps in {summary['training_seconds']:.0f} s ({summary['seconds']:.0f} s in all)"
    )
    lines = [
        head,
        "",
        f"{'on 512 words never seen in training':<38}{'before':>8}{'after':>8}",
        "─" * 54,
    ]
    lines += [
        f"{label:<38}{summary[f'{key}_before']:>8.1%}{summary[f'{key}_after']:>8.1%}" for label, key in rows
    ]
    lines += ["", f"{RUN}/curves.png  {RUN}/summary.json  {RUN}/completions/  {RUN}/tensorboard/"]
    return "\n".join(lines)


def main() -> None:
    """Run the demo."""
    options = arguments()
    os.chdir(ROOT)
    started = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)

    from examples.supervised import make_mediocre_model

    print("1/2  Teaching a 0.28 M parameter model to spell words backward, with many mistakes.", flush=True)
    make_mediocre_model(RUN / "start", seed=options.seed, steps=options.supervised_steps)
    print(
        "\n2/2  Training it with GDPO on two rewards: a correct answer, and a well-formatted one.", flush=True
    )
    train(options.seed, options.steps)
    summary = summarize(time.perf_counter() - started)

    from rlobjectives.integrations.whole_files import write_text

    write_text(RUN / "summary.json", json.dumps(summary, indent=2) + "\n")
    print(f"\n{report(summary)}")


if __name__ == "__main__":
    main()
