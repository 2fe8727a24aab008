"""GGUF files of tiny models, with the fields and tensors that llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

LETTERS = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
TOKENS = ["<s>", "</s>", *LETTERS, "th", "the"]
VOCABULARY = len(TOKENS)
# Number of a model's positions, and the epsilon of its norms.
POSITIONS = 2048
EPSILON = 1e-6
RMS = {"context_length": POSITIONS, "attention.layer_norm_rms_epsilon": EPSILON}


def random_model(kind: str, *, seed: int = 0, **options: Any) -> Any:
    """Build a tiny model of transformers whose weights all differ from their start."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": EPSILON,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        | options,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Return a model's weights as llama.cpp's converter names and orders them."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    weights = model.state_dict()
    tensors = {}
    for name, own in get_gguf_hf_weights_map(model, processor).items():
        if own not in weights or (own == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = weights[own].float().numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            pairs = (heads[part], 2, len(values) // heads[part] // 2, *values.shape[1:])
            values = values.reshape(pairs).swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma2", "gemma3") and "norm.weight" in name:
            values = values + 1
        tensors[name] = np.ascontiguousarray(values)
    return tensors


def write(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    split: tuple[int, int, int] | None = None,
    name: str | None = None,
) -> Path:
    """Write a GGUF file.

    Args:
        path: the file.
        architecture: prefix of the fields.
        fields: those of the architecture; Python's types decide about the file's.
        tensors: fp32 arrays by name.
        split: number of the part, of parts, and of the tensors in all parts.
        name: of the model.
    """
    import gguf

    out = gguf.GGUFWriter(path, architecture)
    # Texts before the name, as some converters write them.
    out.add_array("general.tags", ["text-generation", "tiny"])
    if name is not None:
        out.add_name(name)
    for key, value in fields.items():
        whole = f"{architecture}.{key}"
        match value:
            case bool():
                out.add_bool(whole, value)
            case int():
                out.add_uint32(whole, value)
            case float():
                out.add_float32(whole, value)
            case str():
                out.add_string(whole, value)
            case _:
                out.add_array(whole, value)
    if split is None or split[0] == 0:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("default")
        out.add_token_list(TOKENS)
        out.add_token_types([3, 3] + [1] * (VOCABULARY - 2))
        out.add_token_merges(["t h", "th e"])
        out.add_bos_token_id(0)
        out.add_eos_token_id(1)
        out.add_pad_token_id(0)
    if split is not None:
        out.add_uint16("split.no", split[0])
        out.add_uint16("split.count", split[1])
        out.add_int32("split.tensors.count", split[2])
    for tensor, values in tensors.items():
        out.add_tensor(tensor, np.asarray(values, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def fields_of(model: Any, architecture: str) -> dict[str, Any]:
    """Return the fields that each file of a model with rotation has."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or 16
    fields = RMS | {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10_000.0,
    }
    if architecture in ("gemma2", "gemma3"):
        del fields["rope.dimension_count"]
        fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return fields


def write_gguf(
    path: Path, *, seed: int = 0, architecture: str = "llama", name: str | None = None
) -> Path:
    """Write the file of a tiny Llama; `architecture` is only a name in it."""
    model = random_model("llama", seed=seed)
    fields, tensors = fields_of(model, "llama"), tensors_of(model, "llama")
    return write(path, architecture, fields, tensors, name=name)
