"""Sizes of the tiny random models: served architectures, and rejected ones."""

from importlib import import_module
from typing import Any

import torch
import transformers

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [1.0 + 0.1 * i for i in range(32)],
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Sizes that differ from SIZES. model, config: class names that differ from the family's.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 64},
    "Llama3": {"model": "Llama", "head_dim": 64, "rope_parameters": LLAMA3},
    "Yi": {
        "model": "Llama",
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    },
    "Qwen2": {"hidden_size": 256},
    "Qwen3": {"head_dim": 64},
    "Qwen3Moe": {"head_dim": 64, **EXPERTS},
    "Mistral": {"head_dim": 64, "sliding_window": None},
    "Mixtral": {"head_dim": 64, "sliding_window": None, "num_local_experts": 4},
    "Phi3": {"hidden_size": 256},
    "Phi3LongRoPE": {"model": "Phi3", "hidden_size": 256, "rope_parameters": LONGROPE},
    "Glm4": {"head_dim": 64},
    "Gemma2": {
        "head_dim": 64,
        **HYBRID,
        "attn_logit_softcapping": 5.0,
        "attn_implementation": "eager",
    },
    "Gemma3": {
        "head_dim": 64,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 32,
        "config": "Gemma3TextConfig",
    },
    "Gemma3Wide": {"model": "Gemma3", "config": "Gemma3TextConfig", "head_dim": 256, **HYBRID},
    "GPTNeoX": {"hidden_size": 256, "num_key_value_heads": 4},
    "Phi": {"hidden_size": 256, "partial_rotary_factor": 0.5},
    "Olmo2": {"hidden_size": 256},
    "Cohere2": {"hidden_size": 256, **HYBRID},
    "SmolLM3": {"hidden_size": 256, "no_rope_layers": [1, 0]},
    "Granite": {"hidden_size": 256, "attention_multiplier": 0.05},
    "StableLm": {"hidden_size": 256, "partial_rotary_factor": 0.25},
    "GptOss": {"head_dim": 64, **HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {"hidden_size": 256, "layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {"head_dim": 64, **SHARED, **LINEAR},
    # Gated, with heads of size 256, as published.
    "Qwen3_5": {"config": "Qwen3_5TextConfig", "head_dim": 256, **LINEAR},
    "Qwen3_5Moe": {"config": "Qwen3_5MoeTextConfig", "head_dim": 64, **SHARED, **LINEAR},
    # Full-attention layers have wider heads than sliding layers.
    "Gemma4": {
        "config": "Gemma4TextConfig",
        "head_dim": 64,
        "global_head_dim": 128,
        **HYBRID,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 97,
    },
    "Exaone4": {"head_dim": 64, **HYBRID},
    "Llama4": {
        "config": "Llama4TextConfig",
        "intermediate_size_mlp": 96,
        "head_dim": 64,
        "num_local_experts": 2,
        "attention_chunk_size": 64,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "Glm": {"head_dim": 64},
    "Glm4Moe": {"head_dim": 64, **ROUTED, "n_shared_experts": 1},
    "Glm4MoeLite": LATENT | ROUTED,
    "DeepseekV2": LATENT | ROUTED,
    "DeepseekV3": LATENT | ROUTED,
}

# Gemma 4 E2B and E4B: the last layers read the keys and values of other layers.
GEMMA4_SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 32,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 16,
}

_OWN = "and never calls transformers' attention interface"
# Models that apply rejects, by class: the configuration's sizes and the named cause.
REFUSED: dict[str, dict[str, Any]] = {
    "FalconForCausalLM": {
        "alibi": True,
        "cause": f"adds ALiBi inside its own attention (FalconAttention) {_OWN}",
    },
    "MptForCausalLM": {"cause": f"adds ALiBi inside its own attention (MptAttention) {_OWN}"},
    "BloomForCausalLM": {"cause": f"adds ALiBi inside its own attention (BloomAttention) {_OWN}"},
    "MambaForCausalLM": {"cause": "has no attention that could be sparse"},
    "BertLMHeadModel": {
        "config": "BertConfig",
        "cause": "is not causal: no query of BertSelfAttention is kept from later keys",
    },
    "T5ForConditionalGeneration": {
        "config": "T5Config",
        "d_model": 64,
        "d_ff": 64,
        "num_layers": 1,
        "cause": (
            "is an encoder with a decoder: only causal models with nothing but a decoder are served"
        ),
    },
    "DeepseekV32ForCausalLM": {
        **LATENT,
        **ROUTED,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 64,
        "cause": (
            "selects the keys of each query itself (DeepseekV32Indexer): "
            "patterns cannot replace its selection"
        ),
    },
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# Sizes of the parts of image models.
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "Gemma3": {"vision": VISION, "mm_tokens_per_image": 4},
    "Llava": {
        "vision": VISION | {"model_type": "clip_vision_model"},
        "text": {"model_type": "llama", "head_dim": 64},
    },
    "Qwen2_5_VL": {
        "vision": {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 256},
        "text": {
            "hidden_size": 256,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        },
    },
}


def look_at_themselves(model: Any) -> None:
    """Project each KV head like its first query head: tokens attend most to themselves, and
    tiles differ."""
    for layer in model.model.layers:
        q, k = layer.self_attn.q_proj, layer.self_attn.k_proj
        dim, groups = layer.self_attn.head_dim, k.out_features // layer.self_attn.head_dim
        with torch.no_grad():
            for name in ("weight", "bias"):
                if (own := getattr(k, name)) is not None:
                    first = getattr(q, name).unflatten(0, (groups, -1, dim))[:, 0]
                    own.copy_(first.flatten(0, 1))


# Served from transformers 5.24, which uses the attention interface; rejected before.
SINCE_5_24 = ("GPTJ", "CodeGen")
for _name in SINCE_5_24:
    _module = import_module(f"transformers.models.{_name.lower()}.modeling_{_name.lower()}")
    _sizes = {"n_positions": 1024, "rotary_dim": 8}
    if hasattr(_module, "ALL_ATTENTION_FUNCTIONS"):
        FAMILIES[_name] = _sizes | {"num_key_value_heads": 4}
    else:
        REFUSED[f"{_name}ForCausalLM"] = _sizes | {
            "cause": f"computes its own attention ({_name}Attention) {_OWN}"
        }


def tiny_model(family: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """Return a random causal model in evaluation mode, of a family of FAMILIES or of
    transformers."""
    sizes = SIZES | FAMILIES.get(family, {}) | changes
    name = sizes.pop("model", family)
    return sharpened(_model(f"{name}ForCausalLM", f"{name}Config", sizes, seed))


def pictured_model(family: str) -> Any:
    """Return a random image model of a family of WITH_IMAGES."""
    sizes = dict(WITH_IMAGES[family])
    text = {name: size for name, size in SIZES.items() if not name.endswith("token_id")}
    text |= sizes.pop("text", None) or FAMILIES[family]
    text.pop("config", None)
    sizes |= {"text_config": text, "vision_config": sizes.pop("vision")}
    return sharpened(_model(f"{family}ForConditionalGeneration", f"{family}Config", sizes))


def refused_model(name: str) -> Any:
    """Return a random model of a class of REFUSED."""
    sizes = SIZES | {key: value for key, value in REFUSED[name].items() if key != "cause"}
    return _model(name, name.removesuffix("ForCausalLM") + "Config", sizes)


def _model(name: str, config: str, sizes: dict[str, Any], seed: int = 0) -> Any:
    """Return a model by class name and configuration class name; the sizes may name the latter."""
    configuration = getattr(transformers, sizes.pop("config", config))(**sizes)
    torch.manual_seed(seed)
    return getattr(transformers, name)(configuration).eval()


def sharpened(model: Any) -> Any:
    """Draw a model's weights so that attention is far from uniform, as patterns need it."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5 * 2)
        elif name.endswith("sinks"):
            parameter.data.normal_(mean=4.0)
    return model
