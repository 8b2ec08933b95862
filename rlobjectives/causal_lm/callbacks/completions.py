"""Sample completions on disk: one file for programs, one for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rlobjectives.causal_lm.transcript import Transcript
from rlobjectives.checks import check_positive_int
from rlobjectives.integrations.lightning.files import check_folders
from rlobjectives.integrations.whole_files import write_text

__all__ = ["SaveCompletions"]


class SaveCompletions(Callback):
    """Saves some completions with their rewards every few rollouts of the run and at every validation.

    Writes ``step_00000120_train.jsonl`` and the same as readable ``.txt``, from rank 0's share. Each file is
    written whole, then moved into place.

    Args:
        folder: Where to write; by default ``completions`` in the trainer's root folder.
        every_n_rollouts: Training rollouts between two files.
        limit: Most completions in a file.

    Raises:
        CapabilityError: At set-up, if the folder cannot be written.

    Example:
        >>> SaveCompletions(every_n_rollouts=50, limit=16).limit
        16
    """

    def __init__(self, folder: str | None = None, every_n_rollouts: int = 100, limit: int = 32) -> None:
        check_positive_int("every_n_rollouts", every_n_rollouts)
        check_positive_int("limit", limit)
        self.folder = folder
        self.every_n_rollouts = every_n_rollouts
        self.limit = limit
        self._rollouts = 0

    def state_dict(self) -> dict[str, Any]:
        """Rollouts seen, for modules that do not count them."""
        return {"rollouts": self._rollouts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to count."""
        self._rollouts = int(state_dict["rollouts"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a folder that cannot be written."""
        writes = trainer.is_global_zero
        check_folders("SaveCompletions", self.folders(trainer), writes=writes, module=pl_module, stage=stage)

    def folders(self, trainer: Trainer) -> list[Path]:
        """Where rank 0 will write."""
        return [self._folder(trainer)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save a rollout's completions when it is time."""
        del outputs, batch, batch_idx  # the last starts anew in every epoch
        self._rollouts = getattr(pl_module, "rollouts_made", self._rollouts + 1)
        if (self._rollouts - 1) % self.every_n_rollouts == 0:
            self._save(trainer, getattr(pl_module, "last_rollout", None), "train")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last validation batch's completions."""
        self._save(trainer, getattr(pl_module, "last_validation", None), "val")

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder) if self.folder else Path(trainer.default_root_dir) / "completions"

    def _save(self, trainer: Trainer, transcript: Transcript | None, part: str) -> None:
        if transcript is None or not trainer.is_global_zero:
            return
        folder = self._folder(trainer)
        stem = f"step_{trainer.global_step:08d}_{part}"
        records = transcript.records(self.limit)
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        write_text(folder / f"{stem}.jsonl", "\n".join(lines) + "\n")
        write_text(folder / f"{stem}.txt", "\n\n".join(map(readable, records)) + "\n")


def readable(record: dict[str, Any]) -> str:
    """One completion for a person to read."""
    prompt = record["prompt"]
    if isinstance(prompt, list):
        prompt = "\n".join(f"[{turn['role']}] {turn['content']}" for turn in prompt)
    scores = ", ".join(
        f"{name} {'unscored' if reward is None else format(reward, 'g')}"
        for name, reward in record["rewards"].items()
    )
    cut = "" if record["ended"] else "   (cut at the length limit)"
    return f"prompt      {prompt}\ncompletion  {record['completion']}{cut}\nrewards     {scores}"
