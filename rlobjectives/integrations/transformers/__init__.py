"""Adapters for Hugging Face models: packed rows, and a critic."""

from rlobjectives.integrations.transformers.packed import check_packing, packed_logits
from rlobjectives.integrations.transformers.value import CausalLMWithValue, ValueHead

__all__ = ["CausalLMWithValue", "ValueHead", "check_packing", "packed_logits"]
