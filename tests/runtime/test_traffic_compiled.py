"""torch.compile: decode is one graph, a prefill stays sparse between graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache

import artifacts
from runtime import Headwise, apply_dense
from runtime.attention.layout import NOT_CAUSAL

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
CLOSE = {"atol": 2e-4, "rtol": 1e-3}


@pytest.fixture
def graphs() -> Callable[..., Any]:
    """A backend that runs graphs as they are; graphs.made has them."""
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backend.made.append(graph)
        return graph.forward

    backend.made = []
    return backend


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_decode_in_static_slots_is_the_graphs_it_was(
    family, graphs, build, apply, masked, ids
) -> None:
    model = build(family)
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
        other = build(seed=1)
        with apply(other):
            assert model.generate(prompts[0], **options).tolist() == expected[0]
        assert len(graphs.made) <= 2 * usual
    assert tokens == expected


# Real tokens of each sequence of 200 slots, and the dense calls of a Llama that they end in.
BATCHES: dict[str, tuple[list[tuple[int, int]], dict[str, int]]] = {
    "whole": ([(0, 200), (0, 200)], {}),
    "left": ([(50, 200), (0, 200)], {}),
    "right": ([(0, 150), (0, 200)], {}),
    "holes": ([(0, 200), (0, 200)], {NOT_CAUSAL: 2}),
}


CASES = [
    ("Llama", "whole", True),
    ("Llama", "left", False),
    ("Llama", "right", True),
    ("Llama", "holes", True),
    ("Gemma3", "left", True),
    ("GptOss", "right", False),
]


@pytest.mark.parametrize(("family", "batch", "use_cache"), CASES)
def test_a_compiled_prefill_is_served_as_it_is_uncompiled(
    family, batch, use_cache, graphs, build, apply, ids
) -> None:
    model = build(family)
    prompt = ids(200, batch=2)
    ranges, dense = BATCHES[batch]
    real = torch.zeros_like(prompt)
    for row, (start, end) in zip(real, ranges, strict=True):
        row[start:end] = 1
    if batch == "holes":
        real[0, 20:50] = 0
    given = {"attention_mask": real, "use_cache": use_cache}
    with apply(model) as handle:
        expected = model(prompt, **given).logits
        usual = handle.stats()
    forward = torch.compile(model.forward, backend=graphs)
    with apply(model) as handle:
        found = forward(prompt, **given).logits
        torch.testing.assert_close(found[real > 0], expected[real > 0], **CLOSE)
        assert handle.stats() == usual
        # Another mask of the same shape is another context.
        real[0] = 1
        real[1, :20] = 0
        found = forward(prompt, **given).logits
    with apply(model):
        expected = model(prompt, **given).logits
    torch.testing.assert_close(found[real > 0], expected[real > 0], **CLOSE)
    if family == "Llama":
        assert usual["dense"] == dense
        assert usual["sparse"] == (0 if dense else 2)


def test_lengths_may_change_and_packed_prompts_are_dense(
    graphs, build, apply, ids, warnings
) -> None:
    model = build()
    prompt = ids(300)
    forward = torch.compile(model.forward, backend=graphs)
    dense = model(prompt).logits
    with apply(model) as handle, torch.inference_mode():
        for length in (200, 150, 100):
            found = forward(ids(length)).logits
            torch.testing.assert_close(found, model(ids(length)).logits, **CLOSE)
        assert handle.stats()["sparse"] == 2 * 2 * 2, "100 tokens are too few"
        assert warnings() == []
        # Without a cache and a padding mask, transformers traces the mask of packed prompts,
        # whatever the positions are.
        found = forward(prompt, use_cache=False).logits
        torch.testing.assert_close(found, dense, **CLOSE)
        assert handle.stats()["dense"][NOT_CAUSAL] == 2
    assert len(warnings()) == 1


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_dense_prefills_go_by_the_kernel_that_serves_them_uncompiled(
    family, graphs, build, ids
) -> None:
    model = build(family)
    prompt = ids(1100)
    expected = model(prompt).logits
    with apply_dense(model, by="kernel") as handle:
        model(prompt)
        usual = handle.stats()
    forward = torch.compile(model.forward, backend=graphs)
    with apply_dense(model, by="kernel") as handle:
        found = forward(prompt).logits
        assert handle.stats() == usual
    assert usual["dense"]["dense by kernel"] > 0
    assert ("window by kernel" in usual["dense"]) == (family == "Gemma3")
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_compiled_step_of_training_has_the_same_gradients(
    graphs, build, apply, ids, warnings
) -> None:
    model = build().train()
    prompt = ids(200)

    def gradients(forward: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            forward(prompt, labels=prompt).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(model.forward)
    with apply(model):
        found = gradients(torch.compile(model.forward, backend=graphs))
    torch.testing.assert_close(found, expected)
    assert len(warnings()) == 1 and "gradients" in warnings()[0]


STREAM = artifacts.KVCache(
    policies={"stream": artifacts.Streaming(sinks=4, window=60)}, layers=("stream",) * 2
)


@pytest.mark.parametrize("section", [None, "decode", "packed", "kv_cache", "static"])
def test_a_model_compiled_whole_generates_the_same(
    section, graphs, build, artifact_for, decoding, ids, warnings
) -> None:
    model = build()
    prompt = ids(200)
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
