"""What a module supplies to its training, and what the pieces of the loop see of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.freezing import RestingGroups
from rlobjectives.integrations.lightning.movement import MovementWatch
from rlobjectives.objective import Objective
from rlobjectives.rollouts import Rollouts

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer

    _Base = LightningModule
else:
    _Base = object

__all__ = ["CriticModule", "TrainedModule"]


class TrainedModule(_Base):
    """A module with an objective: `ObjectiveMixin` to those who write one."""

    objective: Objective
    micro_batch_size: int
    windows_per_rollout: int
    epochs_per_rollout: int
    gradient_clip_val: float | None
    normalize_advantages: bool
    seed: int | None
    rollouts_done: int
    unfinished: Any
    unfinished_here: Any

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on one rollout: epochs × windows (fewer where a window is empty)."""
        return self.epochs_per_rollout * self.windows_per_rollout

    def rollout(self, batch: Any) -> Experience:
        """Turn a batch of the data loader into finished sequences with rewards.

        Runs without gradient, from this rollout's own seed. A rank may return any number of sequences, none
        included, but all ranks must fill the same optional columns.

        Args:
            batch: This rank's batch.

        Returns:
            Whole prompt groups, on the module's device, with `Experience.rollouts`.
        """
        del batch
        raise NotImplementedError(f"{type(self).__name__} must define rollout(batch) -> Experience.")

    def score(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and entropies where the objective needs them, of a micro-batch.

        Called through the strategy's wrapped model, with gradient in training and without for old log-probabilities.
        It must run the same layers whatever the micro-batch holds: a dummy's only purpose is to take part in the
        ranks' collectives.

        Args:
            micro_batch: Up to `micro_batch_size` sequences.

        Returns:
            Log-probabilities ``[n, t]`` in nats, entry ``j`` of the token ``input_ids[:, j]`` given its prefix, at
            the temperature it was sampled with; and entropies ``[n, t]`` in nats, or None.
        """
        del micro_batch
        raise NotImplementedError(
            f"{type(self).__name__} must define score(micro_batch) -> (logprobs, entropy)."
        )

    def correct(self, rollouts: Rollouts) -> Tensor:
        """Bool ``[n]``: which responses count as right in the metrics; by default those with a positive first reward."""
        return rollouts.rewards[:, 0] > 0

    def single_optimizer(self) -> LightningOptimizer:
        """The module's only optimizer.

        Raises:
            CapabilityError: If ``configure_optimizers`` gives none or several.
        """
        optimizer = self.optimizers()
        if isinstance(optimizer, list):
            raise CapabilityError(
                f"{type(self).__name__}.configure_optimizers gives {len(optimizer)} optimizers; one is needed. "
                "Use parameter groups for different learning rates."
            )
        return optimizer

    def step_schedulers(self) -> None:
        """Advance every learning-rate scheduler by one optimizer step."""
        for config in self.trainer.lr_scheduler_configs:
            self.lr_scheduler_step(config.scheduler, None)


class CriticModule(TrainedModule):
    """A module with a critic: `CriticMixin` to those who write one."""

    critic_warmup_steps: int
    critic_epochs: int
    bootstrap_truncated: bool
    _resting: RestingGroups | None = None
    _watch: MovementWatch | None = None

    def score_values(self, micro_batch: Experience) -> Tensor:
        """Values of a micro-batch, called through the strategy's wrapped model.

        Its gradient should reach `critic_parameters` alone: where the critic shares the policy's layers, run those
        without gradient here, and with gradient in `score_with_values`.

        Args:
            micro_batch: Up to ``micro_batch_size`` sequences.

        Returns:
            Values ``[n, t]`` in reward units; entry ``j`` is that of the state before the token ``input_ids[:, j]``.
        """
        del micro_batch
        raise NotImplementedError(f"{type(self).__name__} must define score_values(micro_batch) -> values.")

    def score_with_values(self, micro_batch: Experience) -> tuple[Tensor, Tensor | None, Tensor]:
        """`score` and `score_values` in one forward; override where they share layers."""
        logprobs, entropy = self.score(micro_batch)
        return logprobs, entropy, self.score_values(micro_batch)

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """The weights that belong to the critic alone, and train when it trains alone."""
        raise NotImplementedError(f"{type(self).__name__} must define critic_parameters().")

    def watched_parameters(self) -> Iterable[nn.Parameter]:
        """The weights that a warning speaks of if they do not move: by default the critic's last ones, its head."""
        return list(self.critic_parameters())[-1:]

    @property
    def critic_warms_up(self) -> bool:
        """Whether the next optimizer step is one of those that train the critic alone."""
        return self.trainer.global_step < self.critic_warmup_steps

    def policy_parameters(self) -> list[nn.Parameter]:
        """The trainable weights that are not the critic's."""
        critic = {id(parameter) for parameter in self.critic_parameters()}
        return [one for one in self.parameters() if one.requires_grad and id(one) not in critic]

    def resting_groups(self) -> RestingGroups:
        """Lets the policy rest while the critic trains alone."""
        assert self._resting is not None  # made when training begins, where anything trains the critic alone
        return self._resting

    def critic_stepped(self) -> None:
        """Count an optimizer step that trained the critic, and warn once if its head stays where it was."""
        assert self._watch is not None
        self._watch.stepped()
