"""A progress bar with the numbers that matter for a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

__all__ = ["PolicyProgressBar"]

_REWARD = "reward/"
_MEAN = "/mean"


class PolicyProgressBar(TQDMProgressBar):
    """Shows the mean of each reward, accuracy, KL divergence and speed; validation results stay in view.

    Args:
        refresh_rate: Rollouts between two updates of the bar.
        kl: Metric shown as ``kl``; by default the one to the reference policy, else the one to the old policy.

    Example:
        >>> PolicyProgressBar().numbers({"reward/correct/mean": 0.5, "rollout/accuracy": 0.5})
        {'correct': '0.500', 'accuracy': '0.500'}
    """

    def __init__(self, refresh_rate: int = 1, kl: str | None = None) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._kl = (kl,) if kl else ("policy/kl_to_ref", "policy/kl_to_old")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The numbers beside the bar, as text of a fixed width."""
        del pl_module
        return self.numbers({name: float(value) for name, value in trainer.callback_metrics.items()})

    def numbers(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Choose and name the numbers to show.

        Args:
            metrics: All metrics logged so far.
        """
        shown = {
            name.removeprefix(_REWARD).removesuffix(_MEAN): f"{value:.3f}"
            for name, value in metrics.items()
            if name.startswith(_REWARD) and name.endswith(_MEAN)
        }
        named = [("accuracy", "rollout/accuracy", "{:.3f}")]
        named += [("kl", kl, "{:.4f}") for kl in self._kl if kl in metrics][:1]
        named += [("tok/s", "time/tokens_per_second", "{:,.0f}"), ("val", "val/accuracy", "{:.3f}")]
        shown.update({label: form.format(metrics[name]) for label, name, form in named if name in metrics})
        return shown
