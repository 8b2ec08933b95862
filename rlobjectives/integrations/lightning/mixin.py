"""ObjectiveMixin: a LightningModule that trains with an objective, under any supported strategy."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from rlobjectives.capabilities import TrainerFacts
from rlobjectives.checks import check_number, check_positive_int, check_seed
from rlobjectives.distributed import Communicator, check_agreement, ends_together
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.dropout import dropouts, largest_dropout
from rlobjectives.integrations.emptiness import refuse_emptiness
from rlobjectives.integrations.lightning.agreement import check_run, given_options, optimizer_options
from rlobjectives.integrations.lightning.contradictions import refuse_metric_schedulers
from rlobjectives.integrations.lightning.engine import Engine, configure, make_engine
from rlobjectives.integrations.lightning.experience import Experience
from rlobjectives.integrations.lightning.forward_state import forward_side_effects
from rlobjectives.integrations.lightning.normalization import check_normalized
from rlobjectives.integrations.lightning.plan import window_facts
from rlobjectives.integrations.lightning.randomness import base_seed, derive_seed, seeded
from rlobjectives.integrations.lightning.resuming import ResumableRollouts
from rlobjectives.integrations.lightning.rollout_round import Round
from rlobjectives.integrations.lightning.termination import Termination
from rlobjectives.objective import Objective

__all__ = ["ObjectiveMixin"]


class ObjectiveMixin(ResumableRollouts):
    """Adds the training loop of an objective to a `LightningModule`: list it before `LightningModule`.

    One ``training_step`` is one rollout and all optimizer steps on it::

        rollout(batch) → estimate → for each epoch and window: open the window (one collective, more with a pre-pass)
            → for each micro-batch: score, loss, backward → clip, optimizer and scheduler step

    A module supplies two hooks and an optimizer:

    * `rollout` turns a batch of the data loader (prompts, or rollouts that already exist) into an `Experience`;
    * `score` gives the log-probabilities of a micro-batch. It is the module's ``forward``, because strategies only
      see what passes through the wrapped module's forward: do not override ``forward``;
    * ``configure_optimizers``, as in any module. Learning-rate schedulers step once an optimizer step, whatever
      their ``interval`` says.

    What holds under every strategy: a window without a counted token changes nothing (no backward, no optimizer, no
    weight decay, no scheduler); ranks with fewer micro-batches run dummies; an exception on one rank ends all of them
    within seconds, with its words; ranks that were given different options are refused at set-up.
    ``Trainer(max_steps=…)`` counts optimizer steps and may stop inside a rollout; ``batch_idx`` counts rollouts.

    Each rollout starts from a seed made of `seed`, its number and the rank, and leaves the global generators as they
    were. So a run resumed from a checkpoint takes the very steps of an uninterrupted one, provided the data loader
    resumes where it stopped; also from between two steps of a rollout (see `ResumableRollouts`).

    Args:
        objective: What to train for.
        micro_batch_size: Most sequences in one forward and backward on one rank.
        windows_per_rollout: Optimizer steps in one pass over a rollout. Windows take whole prompt groups.
        epochs_per_rollout: Passes over each rollout. With several, groups and sequences are shuffled anew in each.
        gradient_clip_val: Largest 2-norm of the whole gradient; None does not clip.
        normalize_advantages: Whiten the estimate over the rollout and all ranks (ddof 1). Groups without a signal
            and unscored sequences stay exactly 0. Refused for objectives that fix the scale of their advantages, and
            for estimators that finish them in the window (several `columns`).
        seed: Seed of rollouts and shuffles; by default that of ``seed_everything``, else 0.
        disable_dropout: Set every dropout of the model to 0 before training, so that log-probabilities of the same
            weights agree. With dropout on, ratios to `old_logprobs` differ from 1 before any update.
        max_empty_rollouts: Rollouts in a row without any counted token, after which the run stops with an error: such
            a run takes no optimizer step, so it would never reach ``max_steps``.
        **kwargs: Passed on to the next class.

    Raises:
        CapabilityError: If an option is out of range.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule
        >>> from rlobjectives import Objective
        >>> class Policy(ObjectiveMixin, LightningModule):
        ...     def __init__(self, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.logits = torch.nn.Embedding(5, 5)
        ...     def rollout(self, batch):
        ...         return batch  # the loader gives Experience
        ...     def score(self, micro_batch):
        ...         ids = micro_batch.input_ids
        ...         logits = self.logits(ids[:, :-1]).log_softmax(-1)
        ...         logprobs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        ...         return torch.nn.functional.pad(logprobs, (1, 0)), None
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
        >>> Policy(objective=Objective.named("grpo"), micro_batch_size=8).updates_per_rollout
        1
    """

    round_type: ClassVar[type[Round]] = Round
    may_differ: ClassVar[frozenset[str]] = frozenset()
    """Constructor arguments that may have another value on each rank (a folder, a port); all others are compared."""

    def __init__(
        self,
        *,
        objective: Objective,
        micro_batch_size: int,
        windows_per_rollout: int = 1,
        epochs_per_rollout: int = 1,
        gradient_clip_val: float | None = None,
        normalize_advantages: bool = False,
        seed: int | None = None,
        disable_dropout: bool = True,
        max_empty_rollouts: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._options_given = given_options(self, inspect.currentframe())
        for name, count in (
            ("micro_batch_size", micro_batch_size),
            ("windows_per_rollout", windows_per_rollout),
            ("epochs_per_rollout", epochs_per_rollout),
            ("max_empty_rollouts", max_empty_rollouts),
        ):
            check_positive_int(name, count)
        if gradient_clip_val is not None:
            check_number("gradient_clip_val", gradient_clip_val, low=0.0, open_low=True)
        check_seed(seed)
        self.automatic_optimization = False
        self.objective = objective
        self.micro_batch_size = micro_batch_size
        self.windows_per_rollout = windows_per_rollout
        self.epochs_per_rollout = epochs_per_rollout
        self.gradient_clip_val = gradient_clip_val
        self.normalize_advantages = normalize_advantages
        self.seed = seed
        self.disable_dropout = disable_dropout
        self.max_empty_rollouts = max_empty_rollouts
        self._empty_rollouts = 0
        self._engine: Engine | None = None
        self._termination: Termination | None = None

    def trainer_facts(self, datamodule: object | None = None) -> TrainerFacts:
        """What this trainer offers to the objective; extend it with `dataclasses.replace`.

        Args:
            datamodule: The data module, whose ``num_generations`` is read if it has one.
        """
        return TrainerFacts(
            num_generations=getattr(datamodule, "num_generations", None),
            updates_per_rollout=self.updates_per_rollout,
            max_staleness=0,
            normalize_advantages=self.normalize_advantages,
            can_prepass=True,
            offers=self.offers(),
            old_logprobs="recomputed",
            dropout=0.0 if self.disable_dropout else largest_dropout(self),
            whole_groups_per_window=True,
            **window_facts(self, datamodule),
            forward_side_effects=forward_side_effects(self),
        )

    def offers(self) -> dict[str, bool]:
        """Which columns this module gives, and which it cannot; what `rollout` may bring or not is left out.

        No divergences over the vocabulary, and for a value loss no values: those are a `CriticMixin`'s.
        """
        absent = (
            "behavior_kl",
            "ref_kl",
            "teacher_divergence",
            *(("values",) if self.objective.value_loss else ()),
        )
        return dict.fromkeys(absent, False)

    # What the mixin does.

    def check_objective(self, datamodule: object | None = None) -> None:
        """Compare the objective with what this module and its data offer.

        Runs at set-up, and may be called before, as the command line does, since it needs no model.

        Raises:
            CapabilityError: Listing every mismatch at once.
        """
        if type(self).forward is not ObjectiveMixin.forward:
            raise CapabilityError(
                f"{type(self).__name__} overrides forward, which ObjectiveMixin needs to reach score() through the "
                "strategy. Give that method another name, and list ObjectiveMixin before LightningModule."
            )
        for old in ("rollout_columns", "token_columns"):
            if hasattr(self, old):
                raise CapabilityError(
                    f"{type(self).__name__}.{old} is not asked any more. Override offers(), which says for each column "
                    "whether the module gives it."
                )
        facts = self.trainer_facts(datamodule)
        self.objective.check(facts)
        check_normalized(self, getattr(datamodule, "prompts_per_step", None), facts.num_generations)

    def forward(self, micro_batch: Experience, method: str = "score") -> Any:
        """`score`, or another scoring method, reached through the strategy's wrapper."""
        return getattr(self, method)(micro_batch)

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """One rollout and its optimizer steps; without a batch, the steps that are left of the last one."""
        del batch_idx
        if self.unfinished is not None:
            self._round(None)
        if batch is not None and self.unfinished is None:
            self._round(batch)
        if self._termination is not None:
            self._termination.agree(Communicator.world())

    def _round(self, batch: Any) -> None:
        engine = self._ready()
        seed = derive_seed(base_seed(self.seed), "rollout", self.rollouts_done, engine.data_rank)
        engine.settle()
        with ends_together(), seeded(seed):
            one = self.round_type(self, engine)
            metrics = one.run(batch, seed) if self.unfinished is None else one.go_on(self.unfinished)
            engine.settle()
        self.rollouts_done += self.unfinished is None
        skipped = metrics.get("optim/skipped_fraction", 0.0)
        self._empty_rollouts = self._empty_rollouts + 1 if skipped == 1.0 else 0
        refuse_emptiness(self._empty_rollouts, self.max_empty_rollouts, "the run would never reach max_steps")
        self.log_dict(metrics, batch_size=1)

    def setup(self, stage: str) -> None:
        """Check the objective against the trainer and all options against those of the other ranks, in one exchange.

        Also writes the clipping value where DeepSpeed reads it.

        Raises:
            CapabilityError: If the objective does not fit, or a folder of a checkpoint callback, a logger or one of
                this library's callbacks cannot be written; on all ranks, `RankError` on those where it does.
            RankError: If ranks were given different options, naming them.
        """
        super().setup(stage)
        if stage == "fit":
            check_run(self)
            configure(self.trainer, self.gradient_clip_val)
            self._engine = None
            self._termination = Termination(self.trainer)

    def _ready(self) -> Engine:
        """What can only be looked at once the strategy is set up; done at the first step."""
        if self._engine is None:
            if self._termination is None:
                raise CapabilityError(
                    f"{type(self).__name__} overrides setup without calling super().setup(stage), so nothing has been "
                    "checked and no checkpoint can be resumed. Add that call."
                )
            self.single_optimizer()
            refuse_metric_schedulers(self.trainer)
            if self.disable_dropout:
                dropouts(self, disable=True)
            self._engine = make_engine(self)
            check_agreement(optimizer_options(self.single_optimizer()))
        return self._engine
