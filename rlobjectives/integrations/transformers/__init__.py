"""Adapters for Hugging Face models: packed rows, and a critic."""

from rlobjectives.integrations.extras import need

need("rlobjectives.integrations.transformers", "lightning", "transformers")

from rlobjectives.integrations.transformers.packed import check_packing, packed_logits
from rlobjectives.integrations.transformers.value import CausalLMWithValue, ValueHead, aligned_values

__all__ = ["CausalLMWithValue", "ValueHead", "aligned_values", "check_packing", "packed_logits"]
