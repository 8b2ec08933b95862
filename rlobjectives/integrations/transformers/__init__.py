"""Adapters for Hugging Face models: a test of a model before training, packed rows, and a critic."""

from rlobjectives.integrations.extras import need

need("rlobjectives.integrations.transformers", "lightning", "transformers")

from rlobjectives.integrations.transformers.keywords import forward_keywords
from rlobjectives.integrations.transformers.packed import check_packing, packed_logits
from rlobjectives.integrations.transformers.self_test import ModelCheck, check_model
from rlobjectives.integrations.transformers.value import CausalLMWithValue, ValueHead, aligned_values

__all__ = [
    "CausalLMWithValue",
    "ModelCheck",
    "ValueHead",
    "aligned_values",
    "check_model",
    "check_packing",
    "forward_keywords",
    "packed_logits",
]
