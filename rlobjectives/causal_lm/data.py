"""PromptDataModule: prompts in a fixed, resumable order, whole groups on one rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule

from rlobjectives.causal_lm.prompt_rows import PromptSource, fingerprint, load_rows
from rlobjectives.causal_lm.prompts import PromptBatch
from rlobjectives.checks import check_positive_int, check_seed
from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.lightning.agreement import given_options
from rlobjectives.integrations.lightning.randomness import base_seed, derive_seed

__all__ = ["PromptDataModule"]

_FACTS = {"rows": "training prompts:", "rows_hash": "rows of fingerprint"}


class PromptDataModule(LightningDataModule):
    """Prompts for an `ObjectiveMixin` module: ``prompts_per_step`` for each rollout, over all ranks.

    The order depends on `seed` alone, not on the number of ranks: epoch by epoch a new permutation, cut into
    steps; each rank takes its equal part of a step. A prompt's completions are sampled where the prompt is, so
    a group never spreads over ranks. Prompts left over at the end of an epoch wait for another permutation.

    A checkpoint holds how many steps were consumed; a resumed run continues with the very next one, also in the
    middle of an epoch. What the order depends on must then be the same, and is compared: the rows, `prompt_column`,
    `prompts_per_step`, `shuffle` and `seed`. The number of ranks and `num_generations` may change. Loaders are plain iterables: Lightning has no sampler to replace in them, so
    ``use_distributed_sampler`` makes no difference.

    Args:
        dataset: Prompts to train on: a ``.jsonl`` or ``.json`` file, a dataset of the ``datasets`` library (name
            or folder), a dotted path to a function that returns rows, or the rows themselves.
        prompts_per_step: Prompts in one rollout, all ranks together.
        num_generations: Completions sampled per prompt.
        val_dataset: Prompts to validate on, in the same forms.
        test_dataset: Prompts to test on, in the same forms.
        prompt_column: Column with the prompt: a string, or a list of chat messages.
        split: Split of a Hugging Face dataset to train on.
        val_split: Split of a Hugging Face dataset to validate on.
        test_split: Split of a Hugging Face dataset to test on.
        dataset_options: Keyword arguments of the function, or of ``datasets.load_dataset``.
        val_dataset_options: The same for `val_dataset`.
        test_dataset_options: The same for `test_dataset`.
        val_batch_size: Prompts a rank completes at a time in validation and testing.
        shuffle: Whether to permute; without, rows are taken in their order.
        seed: Seed of the order; by default that of ``seed_everything``, else 0.

    Raises:
        CapabilityError: If an option is out of range.

    Example:
        >>> data = PromptDataModule([{"prompt": "1+1="}, {"prompt": "2+2="}], prompts_per_step=1)
        >>> [batch.prompts for batch in data.train_dataloader()]
        [['2+2='], ['1+1=']]
    """

    may_differ: ClassVar[frozenset[str]] = frozenset({"dataset", "val_dataset", "test_dataset"})
    """Constructor arguments that may have another value on each rank: of data sets, the rows are compared."""

    def __init__(
        self,
        dataset: str | list[dict[str, Any]],
        *,
        prompts_per_step: int,
        num_generations: int = 1,
        val_dataset: str | list[dict[str, Any]] | None = None,
        test_dataset: str | list[dict[str, Any]] | None = None,
        prompt_column: str = "prompt",
        split: str = "train",
        val_split: str = "test",
        test_split: str = "test",
        dataset_options: dict[str, Any] | None = None,
        val_dataset_options: dict[str, Any] | None = None,
        test_dataset_options: dict[str, Any] | None = None,
        val_batch_size: int = 64,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._options_given = given_options(self, inspect.currentframe())
        for name, count in (
            ("prompts_per_step", prompts_per_step),
            ("num_generations", num_generations),
            ("val_batch_size", val_batch_size),
        ):
            check_positive_int(name, count)
        check_seed(seed)
        sources = {"dataset": dataset, "val_dataset": val_dataset, "test_dataset": test_dataset}
        for name, source in sources.items():
            if isinstance(source, str) and not source.strip():
                raise CapabilityError(
                    f"{name} is empty; expected a file, a dataset's name, a dotted path to a function, or rows."
                )
        self.prompts_per_step = prompts_per_step
        self.num_generations = num_generations
        self.prompt_column = prompt_column
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.consumed = 0
        self._made_before: int | None = None
        self._sources: dict[str, tuple[PromptSource | None, str, Mapping[str, Any]]] = {
            "train": (dataset, split, dataset_options or {}),
            "val": (val_dataset, val_split, val_dataset_options or {}),
            "test": (test_dataset, test_split, test_dataset_options or {}),
        }
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._fingerprint: str | None = None

    def rows(self, part: str) -> list[dict[str, Any]]:
        """The rows of ``"train"``, ``"val"`` or ``"test"``, read once; empty for a set that was not given."""
        if part not in self._rows:
            source, split, options = self._sources[part]
            self._rows[part] = (
                []
                if source is None
                else load_rows(source, prompt_column=self.prompt_column, split=split, options=options)
            )
        return self._rows[part]

    def setup(self, stage: str) -> None:
        """Read the data and check them against the trainer, before any model is touched.

        Raises:
            CapabilityError: If a step's prompts cannot be split evenly over the ranks, or there are too few; or if
                there is nothing to test on.
        """
        if stage == "test":
            if not self.rows("test"):
                raise CapabilityError("There is nothing to test on. Give test_dataset to the data module.")
            return
        ranks, _ = self._place()
        if self.prompts_per_step % ranks:
            raise CapabilityError(
                f"prompts_per_step is {self.prompts_per_step}, over {ranks} ranks; expected a multiple of {ranks}, "
                "so that every rank has the same number of whole prompt groups."
            )
        if len(self.rows("train")) < self.prompts_per_step:
            raise CapabilityError(
                f"dataset has {len(self.rows('train'))} prompts; prompts_per_step is {self.prompts_per_step}. "
                "Take fewer prompts a step, or give more."
            )
        self.rows("val")

    def train_dataloader(self) -> TrainLoader:
        """Batches of prompts for rollouts, from the step after the last one consumed."""
        return TrainLoader(self, *self._place())

    def val_dataloader(self) -> ValLoader | list[Any]:
        """Each rank's share of the validation prompts; the same number of batches on every rank."""
        return ValLoader(self, "val", *self._place()) if self.rows("val") else []

    def test_dataloader(self) -> ValLoader | list[Any]:
        """The same of the test prompts."""
        return ValLoader(self, "test", *self._place()) if self.rows("test") else []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the step that training is about to take; a loader may have read further ahead."""
        del dataloader_idx
        if isinstance(batch, PromptBatch) and self.trainer is not None and self.trainer.training:
            self.consumed = batch.number + 1
            self._made_before = self._rollouts_made()
        return batch

    def _rollouts_made(self) -> int | None:
        """How many rollouts the module has made of its batches; None if it does not count them."""
        module = getattr(self.trainer, "lightning_module", None)
        return getattr(module, "rollouts_made", None)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the next batch."""
        # A batch of which no rollout came, because sampling or scoring was interrupted, comes again.
        waiting = self._made_before is not None and self._made_before == self._rollouts_made()
        return {
            "consumed": self.consumed - waiting,
            "seed": base_seed(self.seed),
            **self._order_facts(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the last batch consumed.

        Raises:
            CapabilityError: If the order of the prompts would be another one: then a count of steps means nothing.
        """
        facts: dict[str, Any] = self._order_facts()
        if self.shuffle and self.seed is not None:
            facts["seed"] = self.seed
        changed = [
            f"{_FACTS.get(name, name)} {_shown(state_dict.get(name))} (now {_shown(fact)})"
            for name, fact in facts.items()
            if state_dict.get(name) != fact
        ]
        if changed:
            raise CapabilityError(
                f"The checkpoint was made with {', '.join(changed)}; its count of {state_dict.get('consumed')} steps "
                "would lead to other prompts. Resume with the same data and options, or start anew from the weights "
                "alone."
            )
        self.consumed, self._made_before = int(state_dict["consumed"]), None
        self.seed = int(state_dict["seed"]) if self.seed is None else self.seed

    def _order_facts(self) -> dict[str, Any]:
        """What decides, beside the seed, which prompts a step takes."""
        rows = self.rows("train")
        if self._fingerprint is None:
            self._fingerprint = fingerprint(rows)
        return {
            "rows": len(rows),
            "rows_hash": self._fingerprint,
            "prompt_column": self.prompt_column,
            "prompts_per_step": self.prompts_per_step,
            "shuffle": self.shuffle,
        }

    def agreement_facts(self) -> dict[str, Any]:
        """What must be the same on all ranks beside the options: the seed in use, and the rows themselves."""
        rows = {
            "rows": self._order_facts()["rows_hash"],
            "rows of val_dataset": fingerprint(self.rows("val")),
        }
        return {"seed": base_seed(self.seed), **rows}

    def order(self, epoch: int) -> list[int]:
        """Positions of the training rows in an epoch."""
        count = len(self.rows("train"))
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(derive_seed(base_seed(self.seed), "prompts", epoch))
        return torch.randperm(count, generator=generator).tolist()

    def _place(self) -> tuple[int, int]:
        """Number of data-parallel ranks, and which of them this is."""
        if self.trainer is None:
            return 1, 0
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return int(place["num_replicas"]), int(place["rank"])


class TrainLoader:
    """One epoch of steps, from where training stands to the end of the epoch."""

    def __init__(self, data: PromptDataModule, ranks: int, rank: int) -> None:
        self._data, self._ranks, self._rank = data, ranks, rank

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return len(self._data.rows("train")) // self._data.prompts_per_step

    def __iter__(self) -> Iterator[PromptBatch]:
        """The steps that are left of the current epoch."""
        data, rows = self._data, self._data.rows("train")
        epoch, first = divmod(data.consumed, len(self))
        order = data.order(epoch)
        mine = data.prompts_per_step // self._ranks
        for step in range(first, len(self)):
            start = step * data.prompts_per_step + self._rank * mine
            yield PromptBatch(
                [rows[position] for position in order[start : start + mine]],
                prompt_column=data.prompt_column,
                ids=range(self._rank * mine, (self._rank + 1) * mine),
                num_generations=data.num_generations,
                number=epoch * len(self) + step,
            )

    # Lightning asks a loader for its state before it believes that a run can resume inside an epoch. The data
    # module's own state says the same and is what counts.

    def state_dict(self) -> dict[str, Any]:
        """The data module's."""
        return self._data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the last batch consumed, where the order is the same."""
        self._data.load_state_dict(state_dict)


class ValLoader:
    """One rank's validation or test prompts; fillers that do not count make all ranks' loaders equally long."""

    def __init__(self, data: PromptDataModule, part: str, ranks: int, rank: int) -> None:
        self._data, self._part = data, part
        rows = data.rows(part)
        share = -(-len(rows) // ranks)
        self._positions = [rank + ranks * turn for turn in range(share)]

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return -(-len(self._positions) // self._data.val_batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        """Batches in the order of the rows."""
        rows, size = self._data.rows(self._part), self._data.val_batch_size
        for number in range(len(self)):
            positions = self._positions[number * size : (number + 1) * size]
            yield PromptBatch(
                [rows[position % len(rows)] for position in positions],
                prompt_column=self._data.prompt_column,
                ids=positions,
                counted=[position < len(rows) for position in positions],
                number=number,
            )


def _shown(fact: object) -> str:
    return "unknown" if fact is None else str(fact)
