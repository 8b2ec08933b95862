"""ResumableRollouts: checkpoints that hold what is left of a rollout, and runs that go on from them."""

from __future__ import annotations

import secrets
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn

from rlobjectives.errors import CheckpointError
from rlobjectives.integrations.lightning.checkpoints import guard_checkpoints
from rlobjectives.integrations.lightning.contradictions import refuse_contradictions
from rlobjectives.integrations.lightning.ending import EndTogether
from rlobjectives.integrations.lightning.host import TrainedModule
from rlobjectives.integrations.lightning.randomness import base_seed
from rlobjectives.integrations.lightning.unfinished import UnfinishedRollout

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["CHECKPOINT_KEY", "ResumableRollouts"]

CHECKPOINT_KEY = "rlobjectives"


class ResumableRollouts(TrainedModule):
    """The part of `ObjectiveMixin` that survives an interruption.

    A checkpoint between two optimizer steps of a rollout (``max_steps``, a callback, an error) holds what is left of
    it: its sequences, the estimate, the order of the micro-batches, the random generators. A resumed run takes the
    steps that are left before it asks the data loader for anything; callbacks see them as a training batch that is
    None. A checkpoint made while a rollout was being sampled counts that rollout as not made.

    Attributes:
        rollouts_done: Rollouts of which every step was taken.
        unfinished: The rollout in use, while steps of it are left.
    """

    rollouts_done: int = 0
    unfinished: UnfinishedRollout | None = None
    _stored: Mapping[str, Any] | None = None  # of a checkpoint, until the device is known

    @property
    def rollouts_made(self) -> int:
        """Rollouts that were sampled and scored: those done, and the one in use."""
        return self.rollouts_done + (self.unfinished is not None or self._stored is not None)

    # What a module may add.

    def unfinished_state(self) -> dict[str, Any]:
        """What else belongs to a rollout in use: plain data and tensors; extend it with ``super()``."""
        return {}

    def load_unfinished_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `unfinished_state` gave."""

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        """Have checkpoints written whole and verified."""
        super().setup(stage)
        guard = guard_checkpoints(self, self.trainer)
        self._add_missing(stage)
        if stage == "fit":
            self._stored, guard.has_begun = None, False
            guard.run = self.trainer.strategy.broadcast(secrets.token_hex(4))
            if not guard.has_fitted:  # what another trainer has left is none of this one's business
                self.unfinished, guard.has_fitted = None, True

    def configure_callbacks(self) -> Sequence[Callback]:
        """Refuse trainer options that contradict manual optimization; take the steps left of a rollout; end together."""
        refuse_contradictions(self.trainer)
        guard_checkpoints(self, self.trainer)
        found = super().configure_callbacks()
        return [*(found if isinstance(found, Sequence) else [found]), _FinishRollout(), EndTogether()]

    def _add_missing(self, stage: str) -> None:
        """Do what `configure_callbacks` did not, in a module that overrides it without ``super()``."""
        refuse_contradictions(self.trainer)
        callbacks: list[Callback] = cast("Any", self.trainer).callbacks
        for kind in (_FinishRollout, EndTogether):
            if not any(isinstance(one, kind) for one in callbacks):
                added = kind()
                added.setup(self.trainer, self, stage)  # those of the other callbacks have run
                checkpoints = [place for place, one in enumerate(callbacks) if isinstance(one, Checkpoint)]
                callbacks.insert(min(checkpoints, default=len(callbacks)), added)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save how many rollouts were made, the seed they derive from, and what is left of the last one."""
        super().on_save_checkpoint(checkpoint)
        found: dict[str, Any] = {"rollouts_done": self.rollouts_done, "seed": base_seed(self.seed)}
        checkpoint[CHECKPOINT_KEY] = found
        complete = "optimizer_states" in checkpoint  # one of weights alone is no place to go on from
        if complete and self.rollouts_made > self.rollouts_done:
            found["unfinished"] = {
                "step": checkpoint["global_step"],
                "ranks": self.trainer.world_size,
                "objective": self.objective.description,
                "trouble": "" if self.unfinished is None else self.unfinished.trouble(),
            }

    def unfinished_here(self) -> Mapping[str, Any]:
        """This rank's part of the rollout in use, for its file."""
        if self._stored is not None:
            return self._stored
        assert self.unfinished is not None
        return {**self.unfinished.state_dict(), "module": self.unfinished_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the count, the seed of the interrupted run unless the module names one, and the rollout in use.

        Raises:
            CheckpointError: If the rollout in use cannot go on: it belongs to another objective, to another number
                of ranks, or could not be stored.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None:  # weights of another kind of run, such as supervised training
            return
        self.rollouts_done = saved["rollouts_done"]
        self.seed = saved["seed"] if self.seed is None else self.seed
        self.unfinished, self._stored = None, None
        trainer = self._trainer
        if "unfinished" in saved and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._check_unfinished(saved["unfinished"])
            self._stored = saved["unfinished"]["here"]

    def _check_unfinished(self, header: Mapping[str, Any]) -> None:
        begin = f"the checkpoint of step {header['step']} was made between two optimizer steps of a rollout"
        remedy = "take a checkpoint of a rollout's end, or start anew from the weights alone"
        if header["trouble"]:
            raise CheckpointError(f"{begin}, and cannot be gone on from: {header['trouble']}. {remedy}.")
        for name, was, now in (
            ("the objective", header["objective"], self.objective.description),
            ("the number of ranks", header["ranks"], self.trainer.world_size),
        ):
            if was != now:
                raise CheckpointError(
                    f"{begin}, whose steps cannot be taken now: {name} was {was} and is {now}. Resume as it was until "
                    f"the rollout ends, or {remedy}."
                )

    def _restore_unfinished(self) -> bool:
        """Whether there is a rollout to go on with; from a checkpoint, it is put on the device."""
        if self._stored is not None:
            kinds = self.objective.metric_kinds()
            self.unfinished = UnfinishedRollout.from_state_dict(self._stored, kinds, self.device)
            self.load_unfinished_state(self._stored["module"])
            self._stored = None
        return self.unfinished is not None


class _FinishRollout(Callback):
    """Takes the steps that are left of a rollout before the data loader is asked for the next one."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ResumableRollouts)
        guard_checkpoints(pl_module, trainer).has_begun = True
        if not pl_module._restore_unfinished():
            return
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        place = loop.batch_idx
        # As the epoch loop does with a batch; the rest of a rollout has none, and does not count as one.
        connector.on_batch_start(None)
        loop.manual_optimization.run(loop._build_kwargs(OrderedDict(), None, place))
        call._call_callback_hooks(trainer, "on_train_batch_end", None, None, place)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", None, None, place)
        connector.on_batch_end()
        connector.update_train_step_metrics()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ResumableRollouts)
        stopped = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if pl_module._stored is not None and not stopped:
            warnings.warn(
                "this run ended without taking the optimizer steps that are left of the last rollout: the checkpoint's "
                f"epoch counts as over. Raise max_epochs (now {trainer.max_epochs}) to take them.",
                stacklevel=2,
            )
