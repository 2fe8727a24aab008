"""A tiny random model with a tokenizer in a folder, of which commands take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, as text models have theirs in their folder."""
    vocabulary = {
        symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def save_tiny(folder: Path, **changes: Any) -> Path:
    """A random Llama of 3 layers, 6 query and 2 KV heads, with a tokenizer of single bytes."""
    config = {
        "vocab_size": 260,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    family = changes.pop("family", "Llama")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{changes.pop('config', family)}Config")(**config | changes)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # The usual initialisation makes attention nearly uniform: all patterns would be alike.
            parameter.data.normal_(std=2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
