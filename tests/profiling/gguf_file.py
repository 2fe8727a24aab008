"""Writes a tiny random Llama as a GGUF file, with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2


def write_gguf(path: Path, *, seed: int = 0, architecture: str = "llama") -> Path:
    """A readable GGUF file; `architecture` is only a name in it."""
    import gguf

    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<s>", "</s>", *letters, "th", "the"]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.normal(0, 0.2, shape).astype(np.float32))

    kv = HIDDEN * KV_HEADS // HEADS
    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        for name, *shape in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
