"""A round with a critic: values found on the rollout, targets fixed there, and passes that train the critic alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlobjectives.component import WindowContext
from rlobjectives.integrations.lightning.bootstrap import bootstrap_values, with_next_place
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.plan import Turn
from rlobjectives.integrations.lightning.randomness import derive_seed
from rlobjectives.integrations.lightning.rollout_round import Round
from rlobjectives.integrations.lightning.updates import Updates
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.metrics.values import value_metrics
from rlobjectives.objective import Objective
from rlobjectives.statistics import Stat
from rlobjectives.token_parts import TokenLoss
from rlobjectives.tokens import TokenBatch
from rlobjectives.window import Report

if TYPE_CHECKING:
    from rlobjectives.integrations.lightning.engine import Engine
    from rlobjectives.integrations.lightning.host import CriticModule

__all__ = ["CriticRound", "critic_objective"]


def critic_objective(objective: Objective) -> Objective:
    """The part of an objective that trains the critic: its value loss, in the same windows and weights.

    Example:
        >>> alone = critic_objective(Objective.named("ppo", kl={"coef": 0.1}))
        >>> sorted(alone.token_terms()), alone.capabilities.needs_ref_logprobs
        (['policy_loss', 'value_loss'], False)
    """
    return Objective(
        estimator=objective.estimator,
        policy_loss=_NoPolicyLoss(),
        reduction=objective.reduction,
        value_loss=objective.value_loss,
        name=objective.name,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoPolicyLoss(PolicyLoss):
    """Stands where an objective must have a policy loss and there is nothing to teach the policy."""

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        del context
        return TokenLoss(torch.zeros_like(tokens.logprobs), torch.zeros_like(tokens.logprobs))


class CriticRound(Round):
    """A `Round` of a module with a critic.

    Before anything is estimated, the critic judges every sequence of the rollout: those values are what estimates,
    targets and the clipping of the value loss refer to, however often the critic steps afterwards. While the trainer
    has taken fewer than ``critic_warmup_steps`` optimizer steps, updates train the critic alone; ``critic_epochs``
    more passes of that kind follow the ordinary ones.
    """

    module: CriticModule

    def __init__(self, module: CriticModule, engine: Engine) -> None:
        super().__init__(module, engine)
        self.updates = _JointUpdates(module, engine, self.metrics)
        self.critic_updates = _CriticUpdates(module, engine, self.metrics, critic_objective(module.objective))

    def _turns(self, experience: Experience, seed: int) -> list[Turn]:
        plan = self._plan(experience, self.module.critic_epochs, derive_seed(seed, "critic shuffle"))
        return super()._turns(experience, seed) + [("critic", micro_batches) for micro_batches in plan]

    def _updates(self, who: str) -> Updates:
        alone = who == "critic" or self.module.critic_warms_up
        return self.critic_updates if alone else self.updates

    @property
    def _scores_first(self) -> bool:
        return True

    def _check(self, experience: Experience) -> None:
        super()._check(experience)
        rollouts = experience.need_rollouts()
        if self.module.bootstrap_truncated and rollouts.bootstrap_values is None:
            rollouts.need("truncated", "bootstrap_truncated")
            if experience.values is not None or rollouts.values is not None:
                rollouts.need(
                    "bootstrap_values", "bootstrap_truncated, of a rollout that came with its values,"
                )

    def _completed(self, experience: Experience, count: int) -> Experience:
        rollouts = experience.need_rollouts()
        bootstraps = self.module.bootstrap_truncated and rollouts.bootstrap_values is None
        if experience.values is None and not bootstraps:
            experience = experience.replace(values=rollouts.values)
        if experience.values is not None and not bootstraps:
            return super()._completed(experience, count)
        columns: tuple[str, ...] = ("values",)
        method = "score_values"
        if self._needs_old_logprobs(experience):
            self._scored_now = True
            columns, method = (*self._scored_columns, "values"), "score_with_values"  # one pass for both
        if bootstraps:
            return self._bootstrapped(experience, count, columns, method)
        return experience.replace(**self._score_all(experience, count, columns, method))

    def _bootstrapped(
        self, experience: Experience, count: int, columns: tuple[str, ...], method: str
    ) -> Experience:
        """The experience with its columns, and truncated sequences with the value of what would have come next."""
        rollouts = experience.need_rollouts()
        truncated = rollouts.need("truncated", "bootstrap_truncated")
        found = self._score_all(with_next_place(experience, truncated), count, columns, method)
        beyond = bootstrap_values(found["values"], experience.attention_mask).to(truncated.device)
        columns_here = {name: column[:, :-1].contiguous() for name, column in found.items()}
        return experience.replace(
            rollouts=dataclasses.replace(rollouts, bootstrap_values=beyond), **columns_here
        )

    def _judge(self, experience: Experience) -> tuple[Experience, Tensor, dict[str, Stat]]:
        experience, estimate, statistics = super()._judge(experience)
        returns = self.objective.estimator.value_targets(self._rollouts(experience)).to(experience.device)
        assert experience.values is not None  # from the rollout, or found before
        statistics.update(value_metrics(experience.values, returns, experience.layout))
        return experience.replace(returns=returns), estimate, statistics


class _JointUpdates(Updates):
    """Policy and critic together: one forward, one loss, one step."""

    module: CriticModule

    def _columns(self, micro_batch: Experience) -> dict[str, Tensor | None]:
        logprobs, entropy, values = self.engine.forward(micro_batch, "score_with_values")
        return {"logprobs": logprobs, "entropy": entropy, "values": values}

    def _step(self) -> Tensor:
        norm = super()._step()
        self.module.critic_stepped()
        return norm


class _CriticUpdates(Updates):
    """The critic alone: the policy is neither run nor stepped."""

    module: CriticModule
    norm_name: ClassVar[str] = "optim/critic_grad_norm"

    def _columns(self, micro_batch: Experience) -> dict[str, Tensor | None]:
        values = self.engine.forward(micro_batch, "score_values")
        return {"logprobs": torch.zeros_like(values, requires_grad=False), "values": values}

    def _backward(self, loss: Tensor) -> None:
        super()._backward(self.engine.attach(loss, self.module.policy_parameters()))

    def _step(self) -> Tensor:
        self.engine.discard(self.module.policy_parameters())
        with self.module.resting_groups().policy():
            norm = super()._step()
        self.module.critic_stepped()
        return norm

    def _report(self, report: Report) -> None:
        super()._report(report.under(("value/", "loss/value", "window/")))
