"""CriticMixin: an objective with a critic, trained in the same loop and by the same optimizer as the policy."""

from __future__ import annotations

from typing import Any, ClassVar

from rlobjectives.checks import check_positive_int
from rlobjectives.errors import CapabilityError
from rlobjectives.estimators.combined import several_value_targets
from rlobjectives.integrations.lightning.critic_round import CriticRound
from rlobjectives.integrations.lightning.engine import Engine
from rlobjectives.integrations.lightning.freezing import RestingGroups
from rlobjectives.integrations.lightning.host import CriticModule
from rlobjectives.integrations.lightning.mixin import ObjectiveMixin
from rlobjectives.integrations.lightning.movement import MovementWatch

__all__ = ["CriticMixin"]


class CriticMixin(CriticModule, ObjectiveMixin):
    """`ObjectiveMixin` for modules that train a critic beside the policy: PPO, and whatever reads values.

    A round is that of `ObjectiveMixin`, and besides::

        rollout → values of every sequence → estimate, returns → updates of policy and critic
            → ``critic_epochs`` more passes for the critic alone

    Returns and old values are those of the rollout: no later step changes what the critic learns to predict, nor what
    its clipping refers to. A module supplies, beside `rollout`, `score` and an optimizer:

    * `score_values`, the values of a micro-batch; and `score_with_values`, if one forward gives values and
      log-probabilities together;
    * `critic_parameters`, the weights that belong to the critic alone;
    * one optimizer with *named* parameter groups: a group whose ``name`` starts with ``"critic"`` is the critic's.
      Different learning rates are different groups, since DeepSpeed allows one optimizer.

    During ``critic_warmup_steps`` and in the extra passes the policy rests: it is not run, and its weights, its
    optimizer state and its weight decay stay untouched to the last bit, under every strategy. Clipping by
    ``gradient_clip_val`` refers to the whole gradient, policy and critic together where both are trained.

    Args:
        critic_warmup_steps: Optimizer steps of the run that train the critic alone before the policy moves. Nothing
            is wasted on a policy whose advantages come from a critic that knows nothing yet.
        critic_epochs: Passes over each rollout that train the critic alone, after the ordinary ones. They are
            optimizer steps like any other: ``max_steps`` and learning-rate schedules count them.
        bootstrap_truncated: Whether a sequence that was cut off goes on in the estimate with the critic's value of
            the state after its last token, as a game would that was interrupted; or ends there, with the reward it
            got for what it has said, as is usual for answers to a prompt (the default). Rollouts must then say which
            are ``truncated`` (`CausalLMActorCritic` does). `score_values` then sees one position more than there are
            tokens, whose id is 0; columns in ``extra`` stay as long as they are.
        **kwargs: Those of `ObjectiveMixin` and of the next class.

    Raises:
        CapabilityError: If an option is out of range.
        MissingColumnError: In training, if truncated sequences are to be bootstrapped and a rollout does not say which
            they are.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule
        >>> from rlobjectives import Objective
        >>> class Agent(CriticMixin, LightningModule):
        ...     def __init__(self, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.policy, self.critic = torch.nn.Embedding(5, 5), torch.nn.Embedding(5, 1)
        ...     def rollout(self, batch):
        ...         return batch  # the loader gives Experience
        ...     def score(self, micro_batch):
        ...         ids = micro_batch.input_ids
        ...         logits = self.policy(ids[:, :-1]).log_softmax(-1)
        ...         logprobs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        ...         return torch.nn.functional.pad(logprobs, (1, 0)), None
        ...     def score_values(self, micro_batch):
        ...         values = self.critic(micro_batch.input_ids[:, :-1]).squeeze(-1)
        ...         return torch.nn.functional.pad(values, (1, 0))
        ...     def critic_parameters(self):
        ...         return self.critic.parameters()
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW([
        ...             {"params": self.policy.parameters(), "lr": 1e-6, "name": "policy"},
        ...             {"params": self.critic.parameters(), "lr": 1e-5, "name": "critic"},
        ...         ])
        >>> Agent(objective=Objective.named("ppo"), micro_batch_size=8, critic_warmup_steps=10).critic_epochs
        0
    """

    round_type: ClassVar[type[CriticRound]] = CriticRound

    def __init__(
        self,
        *,
        critic_warmup_steps: int = 0,
        critic_epochs: int = 0,
        bootstrap_truncated: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, count in (("critic_warmup_steps", critic_warmup_steps), ("critic_epochs", critic_epochs)):
            if count != 0:
                check_positive_int(f"{name} (0 for none)", count)
        self.critic_warmup_steps = critic_warmup_steps
        self.critic_epochs = critic_epochs
        self.bootstrap_truncated = bootstrap_truncated

    def offers(self) -> dict[str, bool]:
        """The columns of the critic too, and what follows a cut where it is asked for."""
        beyond = ("truncated", "bootstrap_values") if self.bootstrap_truncated else ()
        return super().offers() | dict.fromkeys(("values", "old_values", "returns", *beyond), True)

    def check_objective(self, datamodule: object | None = None) -> None:
        """Compare the objective with what this module offers; a critic that nothing trains or reads is a mismatch.

        Raises:
            CapabilityError: Listing every mismatch at once, or what makes the critic useless.
        """
        super().check_objective(datamodule)
        name, estimator = self.objective.name, self.objective.estimator
        if self.objective.value_loss is None:
            raise CapabilityError(
                f"{name} has no value_loss, so nothing would train the critic of {type(self).__name__}. Give "
                "value_loss: ClippedValueLoss, or use a module without a critic."
            )
        readers = estimator.value_estimators()
        if len(readers) > 1:
            raise CapabilityError(several_value_targets(estimator))
        if not readers:
            raise CapabilityError(
                f"{type(estimator).__name__} reads no critic and gives it nothing to learn, but {type(self).__name__} "
                "has one. Choose GAE, or use a module without a critic."
            )

    def _ready(self) -> Engine:
        first = self._engine is None
        engine = super()._ready()
        if first:
            if self.critic_warmup_steps or self.critic_epochs:
                self._resting = RestingGroups(self.single_optimizer())
                engine.complete_state(self._resting.optimizer)
            self._watch = MovementWatch(
                self.watched_parameters(), name="The value head", communicator=engine.communicator()
            )
        return engine
