"""CONTRIBUTING's walk "Add an argument of attention": with a field of Logits, and where a model's
argument is read, every way to serve a call and every measurement has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from kernels.attention import sparse_attention
from kernels.decode import decode_attention
from kernels.dense import dense_attention
from kernels.logits import Logits
from kernels.patterns.dense import dense_index
from profiling.inside.capture import LayerInputs, capture
from runtime.load import LoadedArtifact
from tests.runtime.conftest import sparse_rows

WARMTH = 2.0


@dataclass(frozen=True, eq=False, slots=True)
class WarmLogits(Logits):
    """Logits of a softmax with a temperature.

    Attributes:
        temperature: logits are divided by it.
    """

    temperature: float = 1.0

    def factor(self, head_dim: int) -> float:
        return Logits.factor(self, head_dim) / self.temperature


def logits_of(scaling: float | None, more: Mapping[str, Any]) -> Logits:
    return WarmLogits(scaling, temperature=more.get("temperature", 1.0))


@pytest.fixture
def warm(monkeypatch) -> None:
    for module in ("attention.function", "attention.call"):
        monkeypatch.setattr(f"runtime.{module}.logits_of", logits_of)
    for module in ("capture", "decode_capture", "dense_decode"):
        monkeypatch.setattr(f"profiling.inside.{module}.logits_of", logits_of)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_new_field_of_logits_reaches_every_op(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 8, 32), torch.randn(1, 2, 50, 32), torch.randn(1, 2, 50, 32)
    index = dense_index(1, 4, 8, 50, q.device)

    def outputs(logits: Logits) -> list[Tensor]:
        how = {"logits": logits, "backend": backend}
        return [
            sparse_attention(q, k, v, index, **how),
            decode_attention(q, k, v, **how).out,
            dense_attention(q, k, v, **how)[0],
        ]

    expected = outputs(Logits(scale=0.1 / WARMTH))
    for out, wanted in zip(outputs(WarmLogits(0.1, temperature=WARMTH)), expected, strict=True):
        assert torch.equal(out, wanted)
        assert not torch.equal(out, outputs(Logits(scale=0.1))[0])


def prefill_and_steps(model: Any, handle: Any, ids: Tensor) -> Tensor:
    """Logits of a prompt's last token and of those after it."""
    cache = handle.new_cache()
    first = model(ids[:, :-3], past_key_values=cache, logits_to_keep=1).logits
    steps = [model(ids[:, [at]], past_key_values=cache).logits for at in range(-3, 0)]
    return torch.cat([first, *steps], 1)


@pytest.mark.parametrize("section", ["prefill", "kv_cache"])
def test_new_argument_of_a_model_is_served_sparsely_and_behind_a_cache(
    section, warm, build, artifact_for, keeping, ids
):
    rows = sparse_rows(build("Llama").config)
    cooler, warmer = build("Llama"), build("Llama")
    for layer in cooler.model.layers:
        layer.self_attn.scaling /= WARMTH
    for layer in warmer.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"temperature": WARMTH}), with_kwargs=True
        )
    logits = []
    for model in (cooler, warmer):
        if section == "prefill":
            loaded = LoadedArtifact(artifact_for(model, rows=rows))
        else:
            loaded = keeping(model, artifacts.SnapKV(budget=120, window=16), patterns=rows)
        with torch.no_grad(), loaded.apply(model, strict=True) as handle:
            logits.append(prefill_and_steps(model, handle, ids(300)))
            assert handle.stats()["sparse"] == 2
    assert torch.equal(*logits)


def test_new_argument_of_a_model_is_measured(warm, build, ids):
    model = build("Llama")
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"temperature": WARMTH}), with_kwargs=True
    )
    scales = []

    def visit(inputs: LayerInputs) -> None:
        scales.append(inputs.scale)

    capture(model, ids(100), visit)
    assert scales == [64**-0.5 / WARMTH, 64**-0.5]
