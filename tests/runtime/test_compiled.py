"""torch.compile: decode is one graph, and what serves a prefill is what serves it uncompiled.

That a compiled batch is served as it is uncompiled is shown by test_architectures.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache

import artifacts
from runtime import Headwise, apply_dense
from runtime.attention.layout import NOT_CAUSAL
from tests.runtime.omnikv import CLOSE
from tests.runtime.tiny import HYBRID

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
SMALL = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", SMALL), pytest.param("Gemma3", {}, marks=pytest.mark.exhaustive)],
)
def test_decode_in_static_slots_is_the_graphs_it_was(
    family: str, changes: dict[str, Any], graphs: Any, build: Any, apply: Any, masked: Any, ids: Any
) -> None:
    model = build(family, **changes)
    prompts = [ids(200), ids(200, seed=1)]
    compiled = CompileConfig(backend=graphs, fullgraph=True, mode=None, dynamic=None)
    # transformers compiles on accelerators only unless told so.
    compiled._compile_all_devices = True
    options = OPTIONS | {"cache_implementation": "static", "compile_config": compiled}
    with masked(model):
        expected = [model.generate(p, **OPTIONS).tolist() for p in prompts]
        model.generate(prompts[0], **options)
        usual = len(graphs.made)
    with apply(model, strict=True) as handle:
        tokens = [model.generate(p, **options).tolist() for p in prompts]
        assert handle.stats()["sparse"] > 0
        assert 0 < len(graphs.made) - usual <= usual
        # Another model's artifact is no reason to compile this one's decode again.
        other = build(seed=1, **SMALL)
        with apply(other):
            assert model.generate(prompts[0], **options).tolist() == expected[0]
        assert len(graphs.made) <= 2 * usual
    assert tokens == expected


@pytest.mark.exhaustive
def test_lengths_may_change_and_packed_prompts_are_dense(
    graphs: Any, build: Any, apply: Any, ids: Any, warnings: Any
) -> None:
    model, prompt = build(**SMALL), ids(300)
    forward = torch.compile(model.forward, backend=graphs)
    dense = model(prompt).logits
    with apply(model) as handle, torch.inference_mode():
        for length in (200, 100):
            found = forward(ids(length)).logits
            torch.testing.assert_close(found, model(ids(length)).logits, **CLOSE)
        assert handle.stats()["sparse"] == 2, "100 tokens are too few"
        assert warnings() == []
        # Without a cache and a padding mask, transformers traces the mask of packed prompts,
        # whatever the positions are.
        found = forward(prompt, use_cache=False).logits
        torch.testing.assert_close(found, dense, **CLOSE)
        assert handle.stats()["dense"][NOT_CAUSAL] == 1
    assert len(warnings()) == 1


def test_dense_prefills_go_by_the_kernels_that_serve_them_uncompiled(
    graphs: Any, build: Any, ids: Any
) -> None:
    model, prompt = build("Gemma3", num_hidden_layers=2, **HYBRID), ids(200)
    with apply_dense(model) as handle:
        expected = model(prompt).logits
        usual = handle.stats()
    forward = torch.compile(model.forward, backend=graphs)
    with apply_dense(model) as handle:
        found = forward(prompt).logits
        assert handle.stats() == usual
    assert usual["dense"] == {"dense by kernel": 1, "window by kernel": 1}
    torch.testing.assert_close(found, expected, **CLOSE)


STREAM = artifacts.KVCache(
    policies={"stream": artifacts.Streaming(sinks=4, window=60)}, layers=("stream",)
)
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "section",
    [
        pytest.param("packed", marks=exhaustive),
        "kv_cache",
        pytest.param(None, marks=exhaustive),
        pytest.param("decode", marks=exhaustive),
        pytest.param("static", marks=exhaustive),
    ],
)
def test_a_model_compiled_whole_generates_the_same(
    section: str | None,
    graphs: Any,
    build: Any,
    artifact_for: Any,
    decoding: Any,
    ids: Any,
    warnings: Any,
) -> None:
    model, prompt = build(**({} if section in ("decode", "packed") else SMALL)), ids(200)
    if section in ("decode", "packed"):
        headwise = decoding(model, filter_layers=(0,), dense_layers=())
    else:
        artifact = artifact_for(model)
        if section is not None:
            artifact = artifact.model_copy(update={"kv_cache": STREAM})
        headwise = Headwise(artifact)
    with headwise.apply(model, backend="reference") as handle:

        def generate() -> list[list[int]]:
            if section == "static":
                options = {"cache_implementation": "static"}
            elif section is None:
                options = {"past_key_values": DynamicCache(config=model.config)}
            else:
                offload = "packed" if section == "packed" else "never"
                options = {"past_key_values": handle.new_cache(offload=offload)}
            tokens: list[list[int]] = model.generate(prompt, **OPTIONS, **options).tolist()
            return tokens

        expected = generate()
        usual = handle.stats()
        model.forward = torch.compile(model.forward, backend=graphs)
        assert generate() == expected
        stats = handle.stats()
        assert stats["sparse"] == 2 * usual["sparse"]
        for served in ("decode", "kept"):
            assert stats.get(served) == (2 * usual[served] if served in usual else None)
    assert len(warnings()) == (section == "static")
