"""Tiny models of every causal architecture of transformers, by configuration type."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.runtime.tiny import sharpened

WINDOW = 16
MOST_PARAMETERS = 30_000_000
# Sizes that apply if the configuration has the field.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}
LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
# Sizes of single architectures.
OTHER: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "axk1": LATENT,
    "longcat_flash": LATENT,
    "zaya": {"num_experts_per_tok": 1},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 128},
    "youtu": LATENT,
    "xmod": {"default_language": "en_XX"},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "glm4_moe_lite": LATENT,
    "jamba": {"attn_layer_offset": 0, "attn_layer_period": 2},
    "mllama": {"cross_attention_layers": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": None},
    "gemma4_text": {"num_kv_shared_layers": 2},
}


def architectures() -> list[str]:
    """Return the configuration types of all causal language models, for tiny_causal."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_causal(model_type: str, **changes: Any) -> Any:
    """Return a random causal model with every kind of layer that its configuration supports.

    Args:
        model_type: the configuration's type.
        changes: sizes other than those of this module.

    Raises:
        Exception: of any type, if the model cannot be built.
    """
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    default = config_class().get_text_config(decoder=True)
    config = _tiny_config(type(default), default, OTHER.get(model_type, {}) | changes)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    with torch.device("meta"):
        try:
            model = cls(config)
        except (AttributeError, TypeError):
            # Models of several parts.
            config = config_class(text_config=config)
            model = cls(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{cls.__name__} is not tiny: {size} parameters")
    torch.manual_seed(0)
    return sharpened(cls(config).eval())


def one_layer(model_type: str, **changes: Any) -> Any:
    """Return a model of one layer, which sees every token if its configuration can say so."""
    default = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])().get_text_config()
    changes |= {"num_hidden_layers": 1}
    if "layer_types" in type(default).__dataclass_fields__:
        changes["layer_types"] = ["full_attention"]
    else:
        changes["sliding_window"] = None
    if "num_kv_shared_layers" in OTHER.get(model_type, {}):
        changes["num_kv_shared_layers"] = 0
    return tiny_causal(model_type, **changes)


def _tiny_config(cls: type[Any], default: Any, other: dict[str, Any]) -> Any:
    sizes = {name: size for name, size in SIZES.items() if _has(default, name)}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds == ["full_attention"] and getattr(default, "sliding_window", None):
        kinds = ["sliding_attention", "full_attention"]
    if kinds != ["full_attention"] and kinds:
        sizes |= {"num_hidden_layers": 2 * len(kinds), "layer_types": kinds * 2}
    # Retry without sizes that some configurations reject.
    for leave_out in (
        (),
        ("layer_types",),
        ("head_dim",),
        ("layer_types", "head_dim"),
        ("num_key_value_heads",),
    ):
        kwargs = {name: size for name, size in sizes.items() if name not in leave_out}
        try:
            return cls(**kwargs | other)
        except Exception as error:
            failure = error
    raise failure


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:
        # Layers differ in this field.
        return True
