"""headwise search on every architecture that the runtime serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import artifacts
from runtime import load
from runtime.layers import attention_layers, sliding_layers
from search.heads import main
from tests.runtime.tiny import FAMILIES, tiny_model
from tests.sampling import sampled
from tests.tiny_text_model import save_tokenizer

# One without a trait of its own, and one for each of a fused projection, a softcap, layers that
# slide, sinks, another layout of modules, and experts. The runtime's matrix has all.
TRAITS = ("Llama", "Phi3", "Gemma2", "Gemma3", "GptOss", "GPTNeoX", "Qwen3Moe")


@pytest.mark.parametrize("family", sampled(FAMILIES, *TRAITS))
@pytest.mark.filterwarnings("ignore")
def test_what_is_found_for_an_architecture_serves_it(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, vocab_size=260)
    out = tmp_path / "cfg.yaml"
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    options = "--preset paper --length 512 --budget 0.6 --dtype float32 --no-picture"
    assert main(["--model", str(tmp_path / "model"), "--out", str(out), *options.split()]) == 0
    modules = attention_layers(model)
    rows = artifacts.load(out).prefill.layers
    found = {layer for layer, row in enumerate(rows) if row is not None}
    assert found == set(modules) - sliding_layers(modules)
    with torch.no_grad(), load(out).apply(model, strict=True) as handle:
        model(torch.randint(3, 250, (1, 512)))
        assert handle.stats()["sparse"] == len(found)
