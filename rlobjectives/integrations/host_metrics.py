"""What the adapters report beside an objective's own metrics, by name: unit, scope and meaning, for docs/metrics.md."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIGHTNING_METRICS", "TRL_METRICS", "HostMetric"]


@dataclass(frozen=True, slots=True)
class HostMetric:
    """A number that a host logs.

    Attributes:
        unit: Unit of the number.
        scope: What it is counted over.
        meaning: One line for the table in the docs.
        reader: Who reports it.
    """

    unit: str
    scope: str
    meaning: str
    reader: str


_ROLLOUT = "mean over the rollout, all ranks"
_STEPS = "mean over the rollout's steps"
_TIME = "this rank, one rollout"
_SET = "mean over the set, all ranks"
_POLICY, _MODULE = "`CausalLMPolicy`", "Lightning's `ObjectiveMixin`"
_BATCH = "the generation batches of a log line"

LIGHTNING_METRICS: dict[str, HostMetric] = {
    "optim/grad_norm": HostMetric("norm", _STEPS, "norm of the gradient, before clipping", _MODULE),
    "optim/critic_grad_norm": HostMetric("norm", _STEPS, "the same, of the critic's own passes", "`CriticMixin`"),
    "optim/skipped_fraction": HostMetric("fraction", _STEPS, "steps without a counted token, which change nothing", _MODULE),
    "rollout/accuracy": HostMetric("fraction", _ROLLOUT, "scored completions whose first reward reaches `accuracy_threshold`", _POLICY),
    "rollout/completion_tokens": HostMetric("tokens", _ROLLOUT, "tokens of a completion", _POLICY),
    "rollout/ended_fraction": HostMetric("fraction", _ROLLOUT, "completions that ended by themselves", _POLICY),
    "time/rollout_seconds": HostMetric("s", _TIME, "sampling and scoring", _MODULE),
    "time/update_seconds": HostMetric("s", _TIME, "all steps on the rollout", _MODULE),
    "time/prepass_seconds": HostMetric("s", _TIME, "passes over the window before its losses", _MODULE),
    "time/tokens_per_second": HostMetric("tokens/s", "all ranks' tokens, this rank's time", "tokens of prompts and completions sampled", _POLICY),
}  # fmt: skip
for _part, _words in (("val", "validation"), ("test", "test")):
    LIGHTNING_METRICS[f"{_part}/accuracy"] = HostMetric(
        "fraction",
        _SET,
        f"{_words} prompts whose greedy completion's first reward reaches `accuracy_threshold`, among those scored",
        _POLICY,
    )
    LIGHTNING_METRICS[f"{_part}/<name>"] = HostMetric(
        "reward", _SET, "one reward of the greedy completions it could score", _POLICY
    )
    LIGHTNING_METRICS[f"{_part}/sampled/accuracy"] = HostMetric(
        "fraction", _SET, "the same of `val_samples` drawn completions per prompt", _POLICY
    )
    LIGHTNING_METRICS[f"{_part}/sampled/<name>"] = HostMetric(
        "reward", _SET, "one reward of those drawn completions", _POLICY
    )

TRL_METRICS: dict[str, HostMetric] = {
    "window/skipped": HostMetric("fraction", "mean over the steps of a log line", "steps without a counted token, which change nothing", "TRL's `ObjectiveMixin`"),
    "sampling/resampled_group_fraction": HostMetric("fraction", _BATCH, "prompt groups that got a signal by being sampled again", "TRL's `dynamic_sampling`"),
    "sampling/dropped_group_fraction": HostMetric("fraction", _BATCH, "prompt groups dropped because they carry no signal", "TRL's `dynamic_sampling`"),
    "sampling/extra_rounds": HostMetric("rounds", _BATCH, "generation rounds beyond the first", "TRL's `dynamic_sampling`"),
}  # fmt: skip
