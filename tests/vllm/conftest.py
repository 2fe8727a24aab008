"""Tiny random model on disk, and artifacts for it, for vLLM engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import artifacts
from runtime.fingerprint import fingerprint
from tests.runtime.conftest import search_info

DENSE_BELOW = 256
PATTERNS: dict[str, Any] = {
    "vs": artifacts.VerticalSlash(vertical=70, slash=70),
    "vs_8": artifacts.VerticalSlash(vertical=130, slash=70, last_q=8),
    "a": artifacts.AShape(sink=64, window=128),
    "bs": artifacts.BlockSparse(blocks=3),
    "dense": artifacts.Dense(),
}
# Layer 0 is dense, layer 1 selects tokens, and layer 2 reads the selection.
DECODE = artifacts.Decode(
    omnikv=artifacts.OmniKV(
        filter_layers=(1,), dense_layers=(0,), selector="last", window=1, budget=48
    )
)
POLICIES: dict[str, Any] = {
    "full": artifacts.Full(),
    "stream": artifacts.Streaming(sinks=4, window=100, positions="original"),
    "snap": artifacts.SnapKV(budget=0.2, window=32, pool=7),
    "wide": artifacts.SnapKV(budget=150, window=40, pool=1),
}
ROWS = (("vs", "a", "bs", "vs_8"), None, ("bs", "vs", "a", "dense"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip these tests without vLLM; tests/runtime/vllm/test_check.py reports it once."""
    return True if importlib.util.find_spec("vllm") is None else None


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return the folder of a random Llama of three layers whose attention is far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
    )
    tiny = LlamaForCausalLM(config)
    for parameter in tiny.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5 * 2)
    folder = tmp_path_factory.mktemp("model")
    tiny.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def transformers(model):
    """Return the same model in transformers."""
    from tests.vllm.engines import Transformers

    return Transformers(model)


@pytest.fixture
def artifact(transformers, tmp_path):
    """Return artifact(rows=, **sections): the path of an artifact for the tiny model."""

    def artifact(rows=ROWS, **sections):
        used = {name for row in rows if row is not None for name in row}
        contents = artifacts.Artifact(
            model=fingerprint(transformers.model, name="tiny"),
            search=search_info(rows, PATTERNS),
            patterns={name: pattern for name, pattern in PATTERNS.items() if name in used},
            prefill=artifacts.Prefill(dense_below=DENSE_BELOW, layers=rows),
            **sections,
        )
        path = tmp_path / "cfg.yaml"
        artifacts.save(contents, path)
        return str(path)

    return artifact


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return torch.randint(2, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def kv_section(*layers: Any, **policies: Any) -> artifacts.KVCache:
    """Return a kv_cache section: per layer a policy's name, or one for each KV head."""
    names = [name for row in layers for name in ((row,) if isinstance(row, str) else row)]
    available = POLICIES | policies
    return artifacts.KVCache(
        policies={name: available[name] for name in dict.fromkeys(names)}, layers=layers
    )
