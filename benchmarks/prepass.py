"""What a pre-pass costs: a P3O step whose window is scored before its losses, with and without reuse.

python benchmarks/prepass.py [--rounds 5] [--hidden 128] [--layers 4] [--tokens 128] [--windows 1]

The rollout is fixed, so a step is scoring, forward, backward and SGD; nothing is generated. Times are CPU seconds of
this process (wall time on a GPU), a run of each setting in turn. Three settings:

none     P3O in micro-batch scope, which needs no pre-pass (and another effective sample size for every cut)
reused   step scope; a window whose weights have not moved since the rollout was scored reuses those numbers
again    step scope, and every window is scored again, as if there were nothing to reuse
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from rlobjectives import GRPO, P3O, Objective, PaddedLayout, Rollouts
from rlobjectives.causal_lm.scoring import score_sequences
from rlobjectives.integrations.lightning import Experience, ObjectiveMixin
from rlobjectives.integrations.lightning.updates import Updates

GROUP, PROMPT = 8, 8
SCOPES = {"none": "micro_batch", "reused": "step", "again": "step"}


def clock() -> float:
    """CPU time of this process, or wall time behind a synchronisation on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Policy(ObjectiveMixin, LightningModule):
    """A fresh Llama, trained on the same completions over and over."""

    def __init__(self, options: argparse.Namespace, scope: Any) -> None:
        super().__init__(
            objective=Objective(estimator=GRPO(), policy_loss=P3O(ess_scope=scope)),
            micro_batch_size=GROUP,
            windows_per_rollout=options.windows,
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=options.vocabulary,
                hidden_size=options.hidden,
                intermediate_size=4 * options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=PROMPT + options.tokens,
            )
        )
        count, width = GROUP * options.windows, PROMPT + options.tokens
        ids = torch.randint(3, options.vocabulary, (count, width))
        lengths = torch.where(torch.arange(count) % 2 > 0, options.tokens, options.tokens // 2)
        positions = torch.arange(width)
        mask = (positions >= PROMPT) & (positions < PROMPT + lengths[:, None])
        self.fixed = Experience(
            input_ids=ids,
            attention_mask=mask | (positions < PROMPT),
            layout=PaddedLayout(mask),
            rollouts=Rollouts(rewards=torch.rand(count), group_ids=torch.arange(count) // GROUP),
            behavior_logprobs=torch.full(mask.shape, -9.0),
        )
        self.seconds: list[float] = []

    def rollout(self, batch: Any) -> Experience:
        """The same every time."""
        del batch
        return self.fixed.to(self.device)

    def score(self, micro_batch: Experience) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities."""
        return score_sequences(self.model, micro_batch, temperature=1.0)

    def configure_optimizers(self) -> Any:
        """SGD that hardly moves."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """One rollout, timed."""
        begin = clock()
        super().training_step(batch, batch_idx)
        self.seconds.append(clock() - begin)


def run(name: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of each rollout but the first, and the last one's ``time/prepass_seconds``."""
    policy = Policy(options, SCOPES[name])
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    opened = Updates._open

    def never_reused(self: Updates, *inputs: Any, reuse: bool) -> Any:
        return opened(self, *inputs, reuse=reuse and name != "again")

    with mock.patch.object(Updates, "_open", never_reused):
        trainer.fit(policy, DataLoader(torch.arange(options.rollouts)))  # type: ignore[arg-type]
    metrics = trainer.callback_metrics
    return policy.seconds[1:], float(metrics.get("time/prepass_seconds", 0.0))


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each setting, in turn (5)")
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts of a run (4)")
    parser.add_argument("--windows", type=int, default=1, help="optimizer steps on a rollout (1)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8_192)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in SCOPES}
    prepass: dict[str, list[float]] = {name: [] for name in SCOPES}
    for _ in range(options.rounds):
        for name in SCOPES:
            seconds, spent = run(name, options)
            times[name].append(statistics.median(seconds) / options.windows)
            prepass[name].append(spent / options.windows)
    print(f"{options.windows} window(s) a rollout, {GROUP} sequences of {options.tokens} tokens each")
    print(f"{'pre-pass':<9}{'s/step':>9}{'ratio':>8}{'of which forward before the losses, wall s':>46}")
    for name, found in times.items():
        ratio = statistics.median(one / base for one, base in zip(found, times["none"], strict=True))
        print(
            f"{name:<9}{statistics.median(found):>9.4f}{ratio:>7.2f}×{statistics.median(prepass[name]):>46.4f}"
        )


if __name__ == "__main__":
    main()
