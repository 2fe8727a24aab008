"""torch.compile: decode is one graph, and compiled prefill takes the same paths as uncompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

import artifacts
from runtime import LoadedArtifact
from runtime.attention.servers import NOT_CAUSAL
from tests.runtime.omnikv import CLOSE

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
SMALL = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", SMALL), pytest.param("Gemma3", {}, marks=pytest.mark.exhaustive)],
)
def test_static_decode_with_artifact_compiles_no_more_graphs(
    family, changes, graphs, build, apply, masked, ids
):
    model = build(family, **changes)
    prompts = [ids(200), ids(200, seed=1)]
    compiled = CompileConfig(backend=graphs, fullgraph=True, mode=None, dynamic=None)
    # transformers compiles on accelerators only, unless this flag is set.
    compiled._compile_all_devices = True
    options = OPTIONS | {"cache_implementation": "static", "compile_config": compiled}
    with masked(model):
        expected = [model.generate(p, **OPTIONS).tolist() for p in prompts]
        model.generate(prompts[0], **options)
        baseline = len(graphs.compiled)
    with apply(model, strict=True) as handle:
        tokens = [model.generate(p, **options).tolist() for p in prompts]
        assert handle.stats()["sparse"] > 0
        assert 0 < len(graphs.compiled) - baseline <= baseline
        # Another model's artifact does not recompile this model's decode.
        other = build(seed=1, **SMALL)
        with apply(other):
            assert model.generate(prompts[0], **options).tolist() == expected[0]
        assert len(graphs.compiled) <= 2 * baseline
    assert tokens == expected


@pytest.mark.exhaustive
def test_compiled_prefill_serves_new_lengths_and_packed_prompts_densely(
    graphs, build, apply, ids, warnings
):
    model, prompt = build(**SMALL), ids(300)
    forward = torch.compile(model.forward, backend=graphs)
    dense = model(prompt).logits
    with apply(model) as handle, torch.inference_mode():
        for length in (200, 100):
            actual = forward(ids(length)).logits
            torch.testing.assert_close(actual, model(ids(length)).logits, **CLOSE)
        assert handle.stats()["sparse"] == 2, "100 tokens are too few"
        assert warnings() == []
        # Without a cache and a padding mask, transformers traces the packed-prompt mask for all
        # positions.
        actual = forward(prompt, use_cache=False).logits
        torch.testing.assert_close(actual, dense, **CLOSE)
        assert handle.stats()["dense"][NOT_CAUSAL] == 1
    assert len(warnings()) == 1


STREAM = artifacts.KVCache(
    policies={"stream": artifacts.Streaming(sinks=4, window=60)}, layers=("stream",)
)


@pytest.mark.parametrize(
    ("section", "compiled"),
    [
        ("kv_cache", "attention"),
        pytest.param("kv_cache", "model", marks=pytest.mark.exhaustive),
        pytest.param("decode", "model", marks=pytest.mark.exhaustive),
        pytest.param("packed", "model", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_generate_equals_uncompiled(
    section, compiled, graphs, build, artifact_for, decoding, ids, warnings
):
    if section == "kv_cache":
        model = build(**SMALL)
        headwise = LoadedArtifact(artifact_for(model).model_copy(update={"kv_cache": STREAM}))
    else:
        model = build()
        headwise = decoding(model, filter_layers=(0,), dense_layers=())
    prompt = ids(200)
    with headwise.apply(model, backend="reference") as handle:

        def generate():
            cache = handle.new_cache(offload="packed" if section == "packed" else "never")
            return model.generate(prompt, past_key_values=cache, **OPTIONS).tolist()

        expected = generate()
        baseline = handle.stats()
        module = model if compiled == "model" else model.model.layers[-1].self_attn
        module.forward = torch.compile(module.forward, backend=graphs)
        assert generate() == expected
        stats = handle.stats()
    for served in ("sparse", "decode", "kept"):
        assert stats.get(served, 0) == 2 * baseline.get(served, 0)
    assert warnings() == []
