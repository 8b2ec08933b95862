"""A critic made of a Hugging Face backbone and a linear head."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.transformers.keywords import forward_keywords, position_ids, unwrapped

__all__ = ["CausalLMWithValue", "ValueHead", "aligned_values"]

_HEAD = "value_head.safetensors"
_FACTS = "value_head.json"


class _WideLinear(nn.Linear):
    """A linear map that computes in float32 at least, whatever precision it, its input or an autocast is in.

    A module of its own, since sharding strategies put a module's weights together when *its* forward is called.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class ValueHead(nn.Module):
    """One number for each hidden state: a linear map in float32, whatever the backbone's precision.

    Weights start as Normal(0, 0.02), the bias at 0, so that first values are small beside any reward. They are float32
    too, until a trainer casts the whole module; the map is computed, and gives its values, in float32 also then.

    Args:
        hidden_size: Width of the hidden states.

    Example:
        >>> ValueHead(8)(torch.zeros(2, 3, 8, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.summary = _WideLinear(hidden_size, 1, dtype=torch.float32)
        nn.init.normal_(self.summary.weight, std=0.02)
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``[…]`` of hidden states ``[…, h]``, in float32 (of a head in float64, in that)."""
        values: Tensor = self.summary(hidden).squeeze(-1)
        return values


def aligned_values(head: nn.Module, hidden: Tensor, attention: Tensor) -> Tensor:
    """Values of the states *before* each token, from the hidden states at each token.

    Args:
        head: A `ValueHead`, or any map from ``[…, h]`` to ``[…]``.
        hidden: Last hidden states ``[n, t, h]``.
        attention: 0/1 ``[n, t]``, int64: the tokens that exist.

    Returns:
        ``[n, t]`` in reward units; 0 at padding and at each first token. Differentiable.

    Example:
        >>> hidden = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> aligned_values(lambda states: states.squeeze(-1), hidden, torch.tensor([[0, 1, 1]]))
        tensor([[0., 0., 2.]])
    """
    values = nn.functional.pad(head(hidden)[:, :-1], (1, 0))
    before = nn.functional.pad(attention[:, :-1], (1, 0))
    return torch.where((attention > 0) & (before > 0), values, 0.0)


def _width(backbone: Any) -> int:
    """Width of a model's last hidden states."""
    output = backbone.get_output_embeddings() if hasattr(backbone, "get_output_embeddings") else None
    if isinstance(output, nn.Linear):
        return output.in_features
    config = backbone.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.hidden_size)


class CausalLMWithValue(nn.Module):
    """Values of every token of a sequence, aligned like log-probabilities.

    Entry j is the value of the state *before* the token ``input_ids[:, j]``, read from the hidden state at j − 1;
    the first real token has no state before it, gets 0 and never counts.

    Args:
        backbone: A Hugging Face causal language model; its own copy (see `copy_of`), or the policy's, whose layers are
            then shared.
        hidden_size: Width of the last hidden states; by default that of what the output layer reads (OPT-350m projects
            its hidden states before that), or ``backbone.config.hidden_size`` where there is none.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> critic = CausalLMWithValue(LlamaForCausalLM(config))
        >>> critic(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long)).shape
        torch.Size([1, 3])
    """

    def __init__(self, backbone: nn.Module, *, hidden_size: int | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = ValueHead(hidden_size or _width(backbone))
        # What FSDP2 shards by itself, by Hugging Face's name for it; the head has a precision of its own.
        self._no_split_modules = [*(getattr(backbone, "_no_split_modules", None) or ()), "ValueHead"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Values ``[n, t]`` in reward units, float32, 0 at padding. Differentiable.

        Args:
            input_ids: ``[n, t]``, padded on either side.
            attention_mask: Bool or 0/1 ``[n, t]``: the tokens that exist.
        """
        attention = attention_mask.long()
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention, "use_cache": False}
        whole = unwrapped(self.backbone)  # adapters such as LoRA's are layers inside it
        inner: nn.Module = getattr(whole, "base_model", whole)
        if "position_ids" in forward_keywords(inner):
            arguments["position_ids"] = position_ids(attention)
        hidden = inner(**arguments).last_hidden_state
        return aligned_values(self.value_head, hidden, attention)

    @classmethod
    def copy_of(cls, policy: nn.Module) -> CausalLMWithValue:
        """A critic whose own backbone starts as a copy of a policy.

        No value reads the copy's output layer, so that layer is frozen: strategies that wait for the gradient of every
        trainable weight (DDP) would wait for it for ever. Where it is tied to the input embeddings, these train.

        Args:
            policy: A Hugging Face causal language model, on any device.
        """
        critic = cls(copy.deepcopy(policy))
        critic.freeze_output_layer()
        return critic

    def freeze_output_layer(self) -> None:
        """Take the backbone's output layer out of training, unless the input embeddings are the same weights."""
        backbone: Any = self.backbone
        inputs = {id(one) for one in backbone.get_input_embeddings().parameters()}
        head = backbone.get_output_embeddings()
        for parameter in () if head is None else head.parameters():
            if id(parameter) not in inputs:
                parameter.requires_grad_(False)

    def save_pretrained(self, folder: str | Path, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the backbone as Hugging Face does, and the head beside it; the folder appears whole or not at all.

        Args:
            folder: Where to. An older critic there is replaced, other folders are refused.
            state_dict: Gathered weights of this module, where the strategy has sharded them (ZeRO-3, FSDP).

        Raises:
            CapabilityError: If the folder exists and is no saved critic.
        """
        from safetensors.torch import save_file

        target = Path(folder)
        if target.exists() and not (target / _HEAD).exists() and any(target.iterdir()):
            raise CapabilityError(
                f"{target} exists and holds no critic. Choose a new folder, or empty that one."
            )
        weights = dict(self.state_dict() if state_dict is None else state_dict)
        heads = {
            name.removeprefix("value_head."): one
            for name, one in weights.items()
            if name.startswith("value_head.")
        }
        body = {
            name.removeprefix("backbone."): one
            for name, one in weights.items()
            if name.startswith("backbone.")
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            self.backbone.save_pretrained(temporary, state_dict=body)  # type: ignore[operator]
            save_file(
                {name: one.detach().cpu().contiguous() for name, one in heads.items()}, temporary / _HEAD
            )
            size = self.value_head.summary.in_features
            (temporary / _FACTS).write_text(json.dumps({"hidden_size": size}), encoding="utf-8")
            temporary.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            temporary.replace(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> CausalLMWithValue:
        """Load what `save_pretrained` wrote, with the backbone's output layer frozen as by `copy_of`.

        Args:
            folder: The folder.
            **options: Further arguments of ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            CapabilityError: If there is no critic in the folder.
        """
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        source = Path(folder)
        if not (source / _HEAD).exists():
            raise CapabilityError(
                f"{source} has no {_HEAD}. Give a folder written by save_pretrained; to start a critic from a policy, "
                "use CausalLMWithValue(model)."
            )
        facts = json.loads((source / _FACTS).read_text(encoding="utf-8"))
        critic = cls(
            AutoModelForCausalLM.from_pretrained(source, **options), hidden_size=facts["hidden_size"]
        )
        critic.value_head.load_state_dict(load_file(source / _HEAD))
        critic.freeze_output_layer()
        return critic

    @staticmethod
    def is_saved_in(folder: str | Path) -> bool:
        """Whether a folder holds what `save_pretrained` wrote."""
        return (Path(folder) / _HEAD).exists()
