"""Tiny random models, one for each way in which a layer can attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling.models.loading import LoadedModel, load_model
from search.published.search import HeadSearch, run
from tests.search.conftest import save_tiny

SHARED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
GROUPED = {**SHARED, "num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny(family: str) -> Any:
    """A random model in fp32; weights are large enough for attention to be uneven."""
    import transformers as t

    torch.manual_seed(0)
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**GROUPED),
        "qwen2": lambda: t.Qwen2Config(**GROUPED),
        "qwen3": lambda: t.Qwen3Config(**GROUPED, head_dim=32),
        "gpt_neox": lambda: t.GPTNeoXConfig(**SHARED),
        "mistral": lambda: t.MistralConfig(**GROUPED, sliding_window=24),
        "gemma3": lambda: t.Gemma3TextConfig(
            **GROUPED, head_dim=32, sliding_window=16, layer_types=LAYERS
        ),
        "gemma2": lambda: t.Gemma2Config(
            **GROUPED, head_dim=32, sliding_window=16, layer_types=LAYERS
        ),
        "gpt_oss": lambda: t.GptOssConfig(
            **GROUPED,
            head_dim=32,
            sliding_window=16,
            layer_types=LAYERS,
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
        "mamba": lambda: t.MambaConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        "mpt": lambda: t.MptConfig(
            vocab_size=97, d_model=64, n_layers=2, n_heads=4, max_seq_len=512
        ),
        "lfm2": lambda: t.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention", "conv"]),
        "llama4": lambda: t.Llama4TextConfig(
            **GROUPED,
            head_dim=16,
            attention_chunk_size=16,
            num_local_experts=2,
            intermediate_size_mlp=96,
            layer_types=["chunked_attention", "chunked_attention", "full_attention"],
        ),
        "bert": lambda: t.BertConfig(**SHARED, is_decoder=False),
    }
    model = t.AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()))
    return model.eval()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Everything here is tiny: on a busy machine threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer; not to be written to."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="session")
def searched(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `tiny`, an artifact `cfg.yaml` of it and a text; not to be written to."""
    place = tmp_path_factory.mktemp("searched")
    (place / "tiny").symlink_to(folder)
    (place / "text.txt").write_text("It was a long way to the sea, and nobody saw it. " * 400)
    model = str(place / "tiny")
    search = HeadSearch(model=model, out=place / "cfg.yaml", length=900, budget="0.8")
    run(replace(search, dtype="float32", picture=False, command="x"))
    return place
