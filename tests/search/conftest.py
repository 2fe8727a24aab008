"""A tiny random model with a tokenizer in a folder: the real command runs in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from search.published.search import HeadSearch, run


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, as text models have theirs in their folder."""
    import transformers as t
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {
        symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def save_tiny(folder: Path, **changes: Any) -> Path:
    """A random Llama of 3 layers, 6 query and 2 KV heads, with a tokenizer of single bytes."""
    import transformers as t

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
    model = getattr(t, f"{family}ForCausalLM")(
        getattr(t, f"{changes.pop('config', family)}Config")(**config | changes)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # The usual initialisation makes attention nearly uniform: all patterns would be alike.
            parameter.data.normal_(std=2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def by_head(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a published search of the tiny model; not to be written to."""
    out = tmp_path_factory.mktemp("by_head") / "cfg.yaml"
    options = {
        "length": 1000,
        "budget": "0.6",
        "dtype": "float32",
        "calibration": "passkey",
        "picture": False,
    }
    run(HeadSearch(model=str(tiny_model), out=out, command="test", **options))
    return out


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Everything here is tiny: on a busy machine threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
