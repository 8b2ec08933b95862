"""TRL's scoring forward with the positions that `generate` uses, and the test of the model before training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trl.models import unwrap_model_for_generation

from rlobjectives.distributed import LOCAL, Communicator
from rlobjectives.distributed.synchronize import raised_together
from rlobjectives.integrations.transformers.keywords import forward_keywords, position_ids, unwrapped
from rlobjectives.integrations.transformers.self_test import check_model, generated
from rlobjectives.integrations.trl.host import Host

__all__ = ["ScoringMixin", "counted_positions"]


class ScoringMixin(Host):
    """Scores as `generate` samples, and makes sure of it before the first step.

    Attributes:
        self_test: Whether the model is tested; None in a class that leaves it to the configuration.
    """

    self_test: Any = None
    _generates: bool = True  # by the model's own `generate`
    _tested: bool = False

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """TRL's log-probabilities, at positions counted from each sequence's first token.

        TRL leaves positions out; a model with absolute ones then counts the padding before a short prompt.
        """
        with counted_positions(model):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _test_model(self) -> None:
        """Before the first step, run `check_model` with TRL's own forward and, if it samples, its own `generate`.

        Raises:
            CapabilityError: What is wrong with the model, on all ranks.
        """
        if self._tested or not self.self_test:
            return
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((kind for name, kind in narrow.items() if getattr(self.args, name, False)), None)
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        ranks = self.accelerator.num_processes
        with raised_together(Communicator.world() if ranks > 1 else LOCAL):
            check_model(
                self.model,
                score=self._scores,
                sample=self._samples,
                samples=self._generates and self._can_unwrap,
                avoid=tokenizer.all_special_ids,
                pad_id=tokenizer.pad_token_id,
                dtype=dtype,
                hint="self_test=False in ObjectiveConfig, or in the class body, trains it all the same.",
            )
        self._tested = True

    def _scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = self._get_per_token_logps_and_entropies(
            self.model,
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=input_ids.shape[1] - 1,
            batch_size=None,
            compute_entropy=False,
        )
        return nn.functional.pad(found[0], (1, 0))

    def _samples(self, prompt_ids: Tensor, prompt_mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
        gather = getattr(self.args, "ds3_gather_for_generation", True)
        with (
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, gather_deepspeed3_params=gather
            ) as model,
            self._whole_root(),
        ):
            sample = generated(model, self.temperature, generation_config=self.generation_config)
            return sample(prompt_ids, prompt_mask, count)

    @property
    def _can_unwrap(self) -> bool:
        """Whether `generate` finds whole weights; older releases of TRL gather FSDP's in a way of their own."""
        return hasattr(self, "_dist") or not getattr(self, "is_fsdp_enabled", False)

    def _whole_root(self) -> Any:
        if not hasattr(self, "_dist"):
            return contextlib.nullcontext()
        return self._dist.summon_full_params(self.model_wrapped, recurse=False)


@contextlib.contextmanager
def counted_positions(model: nn.Module) -> Iterator[None]:
    """Give a text model's forward, where it takes them and got none, positions counted from the first real token.

    A model of text and images makes positions of its own.

    Args:
        model: Wrapped or not; it is called with ``attention_mask``.
    """
    config: Any = getattr(unwrapped(model), "config", None)
    text = config is not None and getattr(config, "get_text_config", lambda: config)() is config
    if not text or "position_ids" not in forward_keywords(model):
        yield
        return
    # On the outermost module: torch.compile does not look again at the hooks of those inside.
    handle = model.register_forward_pre_hook(_with_positions, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _with_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    del model
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and mask is not None and mask.dim() == 2:
        kwargs = {**kwargs, "position_ids": position_ids(mask)}
    return args, kwargs
