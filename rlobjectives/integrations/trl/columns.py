"""TRL's dictionaries as layouts and token columns."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlobjectives._moved import moved_names
from rlobjectives.checks import shown
from rlobjectives.columns import COLUMNS, Read, merged
from rlobjectives.errors import CapabilityError
from rlobjectives.layouts import PaddedLayout
from rlobjectives.objective import Objective
from rlobjectives.tokens import TokenBatch

if TYPE_CHECKING:
    from rlobjectives.integrations.trl.host import Host

__all__ = [
    "GENERATED_AT",
    "GROUP",
    "KEPT",
    "MADE",
    "SAMPLED",
    "brought",
    "brought_column",
    "forward",
    "image_columns",
    "key",
    "not_brought",
    "scoring_parameters",
    "token_batch",
    "token_layout",
]

GROUP = "rlobjectives_group"
"""Prompt of each sequence, unique over the run: int64 ``[B]``."""
KEPT = "rlobjectives_kept"
"""False where dynamic sampling dropped the sequence's group: bool ``[B]``."""
SAMPLED = "rlobjectives_sampled_logps"
"""Log-probabilities under the weights that sampled, recomputed: ``[B, T]``."""
GENERATED_AT = "rlobjectives_generated_at"
"""Optimizer step at which the batch was sampled: 0-d int64."""

MADE = (
    "logprobs",
    "old_logprobs",
    "behavior_logprobs",
    "ref_logprobs",
    "entropy",
    "prompt_tokens",
    "prompt_sequences",
)
"""Columns that come from TRL's own passes and batches."""

_HOOK = "_get_per_token_logps_and_entropies"
_HANDLED = {
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
}


def token_layout(inputs: dict[str, Any]) -> PaddedLayout:
    """The completion tokens that carry loss: not padding, not a tool's, not truncated, not dropped.

    Args:
        inputs: A micro-batch, or a whole generation batch, of TRL.
    """
    mask = inputs["completion_mask"].bool()
    if inputs.get("tool_mask") is not None:
        mask = mask & inputs["tool_mask"].bool()
    kept = inputs.get(KEPT)
    if kept is None:
        return PaddedLayout(mask)
    return PaddedLayout(mask & kept.unsqueeze(1), sequence_mask=kept)


def scoring_parameters(trainer: Host | type[Host]) -> list[str]:
    """Names of what TRL's scoring forward takes, behind wrappers that pass everything on.

    TRL 1.14 has such a wrapper itself; who asked its hook alone would leave the pixels out.

    Raises:
        CapabilityError: If all that is there passes everything on.
    """
    kind = trainer if isinstance(trainer, type) else type(trainer)
    owners = [trainer, *(base for base in kind.__mro__ if _HOOK in vars(base))]
    hooks = [getattr(owner, _HOOK) for owner in owners if hasattr(owner, _HOOK)]
    for hook in (*hooks, getattr(kind, "_full_logits_logps", None)):
        if hook is None:
            continue
        found = inspect.signature(hook).parameters
        if all(one.kind is not one.VAR_KEYWORD for one in found.values()):
            return [name for name in found if name != "self"]
    raise CapabilityError(
        f"{kind.__name__}.{_HOOK} takes any keyword, so nobody can tell which columns of a batch the model reads. "
        "Name its parameters as TRL does."
    )


def image_columns(trainer: Host | type[Host]) -> list[str]:
    """Columns of a batch that belong to images and not to tokens: rows of them are not sequences."""
    return [one for one in scoring_parameters(trainer) if one not in _HANDLED and "token_type" not in one]


def forward(
    trainer: Host,
    model: nn.Module,
    inputs: dict[str, Any],
    *,
    entropy: bool,
    aux_loss: bool = False,
    batch_size: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of the completion tokens, their entropy, and the load-balancing loss.

    Whatever else the model reads (pixels, token types) is passed through under the name TRL gives it.

    Returns:
        ``[B, T]``, ``[B, T]`` or None, 0-d or None.
    """
    extra = {
        name: inputs[name]
        for name in scoring_parameters(trainer)
        if name not in _HANDLED and inputs.get(name) is not None
    }
    if aux_loss:
        extra["compute_aux_loss"] = True
    found = trainer._get_per_token_logps_and_entropies(  # the hook that every version has
        model,
        input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        logits_to_keep=inputs["completion_ids"].shape[1],
        batch_size=batch_size,
        compute_entropy=entropy,
        **extra,
    )
    # Two results up to TRL 1.6, three since.
    return found[0], found[1], found[2] if len(found) > 2 else None


def token_batch(
    inputs: dict[str, Any],
    layout: PaddedLayout,
    logprobs: Tensor,
    *,
    reads: Iterable[str] = (),
    advantages: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenBatch:
    """The columns of one micro-batch, those of ``reads`` among them that a ``rollout_func`` or the data brought.

    Without TRL's old log-probabilities the policy has not moved since it sampled, and the ratio is exactly 1.
    The sampler's own log-probabilities are those of vLLM or of a ``rollout_func``; a sampler that is the policy
    itself has them recomputed.
    """
    old = inputs.get("old_per_token_logps")
    sampler = inputs.get("sampling_per_token_logps")
    behavior = next((one for one in (sampler, old, inputs.get(SAMPLED)) if one is not None), None)
    # TRL marks tokens that vLLM gave no log-probability for with NaN.
    known = None if sampler is None else ~torch.isnan(sampler)
    rest = {name: inputs[key(name)] for name in reads if key(name) in inputs}
    return TokenBatch(
        logprobs=logprobs,
        layout=layout,
        advantages=advantages,
        old_logprobs=old,
        behavior_logprobs=behavior,
        behavior_known=known,
        ref_logprobs=inputs.get("ref_per_token_logps"),
        entropy=entropy,
        extra={name: column for name, column in rest.items() if name not in COLUMNS},
        **{name: column for name, column in rest.items() if name in COLUMNS},
    )


def brought(objective: Objective) -> dict[str, Read]:
    """Columns that an objective reads and that are not TRL's to make: a ``rollout_func`` or the data bring them."""
    reads = merged([*objective.reads().values(), *objective.estimator_reads().values()])
    return {
        name: one
        for name, one in reads.items()
        if name not in COLUMNS or (name not in MADE and one.required and one.column.per == "token")
    }


def key(name: str) -> str:
    """Under which a batch holds a column that was brought."""
    return f"rlobjectives_{name}"


def not_brought(
    inputs: list[dict[str, Any]], completion_ids: list[list[int]], reads: Mapping[str, Read]
) -> str | None:
    """What to say where rows lack a column that the objective reads, or have too few of its numbers; or None.

    Args:
        inputs: TRL's rows: the data's columns, and what the ``rollout_func`` returned beside its own.
        completion_ids: Tokens of each completion.
        reads: What must be there.
    """
    for name, one in reads.items():
        for position, (row, ids) in enumerate(zip(inputs, completion_ids, strict=True)):
            said, token = row.get(name), one.column.per == "token"
            if said is None and not one.required:
                continue
            count = len(said) if isinstance(said, (list, tuple, Tensor)) else None
            if count != len(ids) if token else not isinstance(said, (int, float)):
                got = "none" if said is None else shown(said) if count is None else f"{count} numbers"
                wanted = (
                    f"one list per completion, one number per token of its {len(ids)}"
                    if token
                    else "one number per row"
                )
                return (
                    f"the objective reads {name} ({one.column.meaning or 'a column of your own'}), but completion {position} "
                    f'came with {got}. Let rollout_func return "{name}" beside "logprobs"'
                    + ("" if token else ", or give the data that column")
                    + f": {wanted}."
                )
    return None


def brought_column(inputs: list[dict[str, Any]], read: Read) -> Tensor | None:
    """A column as TRL pads them: float32 ``[B, T]``, 0 behind the end; per sequence ``[B]``; None where no row has it."""
    found = [row.get(read.column.name) for row in inputs]
    if any(one is None for one in found):
        return None
    if read.column.per == "sequence":
        return torch.tensor(found, dtype=torch.float32)
    return pad_sequence([torch.as_tensor(one, dtype=torch.float32) for one in found], batch_first=True)


__getattr__ = moved_names(__name__)
