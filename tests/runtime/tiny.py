"""Sizes of the tiny random models, one set for each architecture."""

from typing import Any

DENSE_BELOW = 128
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 64},
    "Qwen3": {"head_dim": 64},
    "Gemma3": {
        "head_dim": 64,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 32,
        "config": "Gemma3TextConfig",
    },
    "Phi3": {"hidden_size": 256},
    "GPTNeoX": {"hidden_size": 256, "num_key_value_heads": 4},
    "Gemma2": {
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "attn_logit_softcapping": 5.0,
        "attn_implementation": "eager",
    },
}
