"""Tiny random models of many architectures."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that a fault shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "phi": {},
    "phi3": {},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "gpt_neox": {},
    "gptj": {**GPT2, "rotary_dim": 4},
    "olmo": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "starcoder2": {},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "head_dim": 8,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "decoder_sparse_step": 1,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        "head_dim": 8,
    },
}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 16,
        "head_dim": 8,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
}
EVERY = {**DECODERS, **HYBRIDS, **RECURRENT}
WORKING = sorted(EVERY.keys() - {"rwkv"})


def fields(kind: str, **overrides: Any) -> dict[str, Any]:
    """Configuration fields of a tiny model: what is common, as far as its configuration class has it; no dropout."""
    plain = AutoConfig.for_model(kind)
    common = {name: value for name, value in COMMON.items() if hasattr(plain, name)}
    still = {name: 0.0 for name, value in vars(plain).items() if "drop" in name and isinstance(value, float)}
    return {**still, **common, **EVERY[kind], **overrides}


def tiny(kind: str, **overrides: Any) -> Any:
    """A model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields(kind, **overrides))).eval()
