"""A tiny random model of every causal architecture that the installed transformers has."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.runtime.tiny import SIZES

# Sizes for those configurations that have such a field.
_SMALL = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 32,
    "sliding_window": 24,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_hidden_size": 96,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "d_model": 128,
    "n_positions": 1024,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_dim": 96,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
_ALTERNATING = ["sliding_attention", "full_attention"]
_LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_EVERY_HEAD = {"num_key_value_heads": 4}
# Sizes of single architectures.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 0, "attn_layer_period": 2},
    "kimi_linear": _LINEAR,
    "bailing_hybrid": _LINEAR,
    "olmo_hybrid": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "inkling_text": {"num_hidden_layers": 6},
    "inkling2_text": {"num_hidden_layers": 6},
    "zaya": {"num_experts_per_tok": 1},
    "axk2": _EVERY_HEAD,
    "deepseek_v32": _EVERY_HEAD,
    "glm_moe_dsa": _EVERY_HEAD,
    "hy_v4": _EVERY_HEAD,
    "longcat_flash": {**_EVERY_HEAD, "qk_head_dim": 32, "head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _ALTERNATING * 2,
        "hidden_size_per_layer_input": 16,
    },
    "zamba": {
        "num_hidden_layers": 8,
        "layer_types": ["mamba", "mamba", "hybrid", "mamba"] * 2,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"] * 2,
    },
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
}
# Types that no such sizes make a small model of: parts of other models, whose sizes are nested, and
# models that take more than tokens.
NOT_TINY = {
    "blt",
    "cohere_compass_text",
    "dbrx",
    "dots3_note",
    "dots3_note_text",
    "emu3",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_assistant",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "git",
    "got_ocr2",
    "gpt_neo",
    "llama4",
    "mllama",
    "moss_transcribe_diarize",
    "musicgen",
    "musicgen_melody",
    "phi4_multimodal",
    "prophetnet",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "xlnet",
}
MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_TINY)


def every_model(model_type: str, **changes: Any) -> Any:
    """A random model of a causal architecture, in evaluation mode.

    changes: to the sizes, for those fields that its configuration has.
    """
    config = CONFIG_MAPPING[model_type]
    fields = _fields(model_type)
    sizes = SIZES | {name: size for name, size in _SMALL.items() if name in fields}
    sizes |= _OWN.get(model_type, {})
    sizes |= {name: size for name, size in changes.items() if name in fields}
    torch.manual_seed(0)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    model = getattr(transformers, name)(config(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5 * 2)
    return model


def one_layer(model_type: str, **changes: Any) -> Any:
    """A model of one layer, which sees every token where a configuration can say so."""
    changes["num_hidden_layers"] = 1
    if "layer_types" in _fields(model_type):
        changes["layer_types"] = ["full_attention"]
    else:
        changes["sliding_window"] = None
    return every_model(model_type, **changes)


def _fields(model_type: str) -> set[str]:
    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
