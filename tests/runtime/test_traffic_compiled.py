"""torch.compile: decode is one graph, a whole prefill stays sparse, and nothing is wrong where
neither is possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import artifacts
from artifacts import HeadwiseError
from runtime import Headwise, apply_dense
from runtime.attention import compiled
from runtime.attention.compiled import layout_of
from runtime.attention.layout import Layout
from runtime.attention.reasons import NOT_CAUSAL
from tests.sampling import sampled

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
CLOSE = {"atol": 2e-4, "rtol": 1e-3}


@pytest.fixture
def graphs() -> Callable[..., Any]:
    """A backend that runs what it is given as it is; graphs.made has what that was."""
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backend.made.append(graph)
        return graph.forward

    backend.made = []
    return backend


@pytest.fixture
def maskless(graphs, build, ids) -> None:
    """Skips where transformers, older ones do, makes a mask of a plain prefill whenever it is
    compiled."""
    masks = []

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
        masks.append(mask is not None)
        return sdpa_attention_forward(module, q, k, v, mask, **given)

    AttentionInterface.register("seeing", attention)
    AttentionMaskInterface.register("seeing", sdpa_mask)
    torch.compile(build(attn_implementation="seeing").forward, backend=graphs)(ids(70))
    torch._dynamo.reset()
    graphs.made.clear()
    if any(masks):
        pytest.skip("this transformers makes a mask of every prefill that is compiled")


def config(backend: Any) -> CompileConfig:
    made = CompileConfig(backend=backend, fullgraph=True, mode=None, dynamic=None)
    # transformers compiles on accelerators only unless told so.
    made._compile_all_devices = True
    return made


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3"])
def test_decode_in_static_slots_is_the_graphs_it_was(
    family, graphs, build, apply, masked, ids
) -> None:
    model, prompts = build(family), [ids(200), ids(200, seed=1)]
    how = {"cache_implementation": "static", "compile_config": config(graphs)}
    with masked(model):
        expected = [model.generate(p, **OPTIONS).tolist() for p in prompts]
        model.generate(prompts[0], **OPTIONS, **how)
        usual = len(graphs.made)
    with apply(model, strict=True) as handle:
        found = [model.generate(p, **OPTIONS, **how).tolist() for p in prompts]
        assert handle.stats()["sparse"] > 0
        assert 0 < len(graphs.made) - usual <= usual
        # Another model's artifact is no reason to compile this one's decode again.
        other = build(seed=1)
        with apply(other):
            assert model.generate(prompts[0], **OPTIONS, **how).tolist() == expected[0]
        assert len(graphs.made) <= 2 * usual
    assert found == expected


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_a_compiled_prefill_is_sparse(family, maskless, graphs, build, apply, masked, ids) -> None:
    model, prompt = build(family), ids(200, batch=2)
    sparse = list(getattr(model.config, "layer_types", None) or ["full_attention"] * 2).count(
        "full_attention"
    )
    dense = model(prompt).logits
    with masked(model):
        expected = model(prompt).logits
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    with apply(model, strict=True) as handle:
        for _ in range(3):
            torch.testing.assert_close(forward(prompt).logits, expected, **CLOSE)
        assert handle.stats() == {"sparse": 3 * sparse, "dense": {}}
        assert len(graphs.made) == 1
    torch.testing.assert_close(forward(prompt).logits, dense, **CLOSE)


def test_lengths_that_change_are_compiled_once_more(
    maskless, graphs, build, apply, masked, ids
) -> None:
    model, prompts = build(), [ids(n) for n in (200, 230, 150, 300, 100)]
    with masked(model):
        expected = [model(p).logits for p in prompts]
    with apply(model, strict=True) as handle:
        forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
        for prompt, logits in zip(prompts, expected, strict=True):
            torch.testing.assert_close(forward(prompt).logits, logits, **CLOSE)
        assert handle.stats()["sparse"] == 4 * 2, "100 tokens are too few"
    assert len(graphs.made) <= 4


@pytest.mark.parametrize("family", sampled(["Llama", "Gemma3", "GptOss"], "Gemma3"))
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prefill_that_is_compiled_is_sparse(
    family, side, graphs, build, apply, masked, ids
) -> None:
    model, prompt = build(family), ids(200, batch=2)
    real = torch.ones_like(prompt)
    real[0, slice(0, 50) if side == "left" else slice(150, 200)] = 0
    with apply(model, strict=True) as handle:
        expected = model(prompt, attention_mask=real).logits
        usual = handle.stats()
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    with apply(model, strict=True) as handle:
        for _ in range(2):
            found = forward(prompt, attention_mask=real).logits
            torch.testing.assert_close(found[real > 0], expected[real > 0], **CLOSE)
        assert handle.stats()["sparse"] == 2 * usual["sparse"] > 0
        # Another mask of the same shape is read anew.
        real[0], real[1, :20] = 1, 0
        one = forward(prompt[1:], attention_mask=real[1:]).logits
    with masked(model):
        torch.testing.assert_close(one[0, 20:], model(prompt[1:, 20:]).logits[0], **CLOSE)


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_a_prefill_without_a_cache_that_is_compiled_is_sparse(
    inference, graphs, build, apply, masked, ids
) -> None:
    # Where nothing is cached, transformers traces the mask of packed prompts, whatever the
    # positions are.
    model, prompt = build(), ids(300)
    restarts = torch.cat([torch.arange(180), torch.arange(120)])[None]
    forward = torch.compile(model.forward, backend=graphs)
    packed = model(prompt, position_ids=restarts, use_cache=False).logits
    with masked(model):
        alone = model(prompt, use_cache=False).logits
    with apply(model) as handle, torch.inference_mode() if inference else nullcontext():
        torch.testing.assert_close(forward(prompt, use_cache=False).logits, alone, **CLOSE)
        assert handle.stats() == {"sparse": 2, "dense": {}}
        torch.testing.assert_close(
            forward(prompt, position_ids=restarts, use_cache=False).logits, packed, **CLOSE
        )
        assert handle.stats() == {"sparse": 2, "dense": {NOT_CAUSAL: 2}}


def test_another_mask_than_a_prompts_is_dense_and_said_once(
    graphs, build, apply, ids, warnings
) -> None:
    model, prompt = build(), ids(200, batch=2)
    real = torch.ones_like(prompt)
    real[0, 20:50] = 0
    expected = model(prompt, attention_mask=real).logits
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    with apply(model) as handle:
        for _ in range(2):
            found = forward(prompt, attention_mask=real).logits
            torch.testing.assert_close(found[real > 0], expected[real > 0], **CLOSE)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "with holes" in warnings()[0]
    with (
        apply(model, strict=True),
        pytest.raises(HeadwiseError, match=r"cannot serve .* with holes"),
    ):
        forward(prompt, attention_mask=real)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_what_stays_dense_is_served_by_the_kernel_that_serves_it_uncompiled(
    family, graphs, build, ids
) -> None:
    model, prompt = build(family), ids(1100)
    expected = model(prompt).logits
    with apply_dense(model, by="kernel") as handle:
        model(prompt)
        usual = handle.stats()
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    with apply_dense(model, by="kernel") as handle:
        found = forward(prompt).logits
        assert handle.stats() == usual
    assert usual["dense"]["dense by kernel"] > 0
    assert ("window by kernel" in usual["dense"]) == (family == "Gemma3")
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_mask_is_read_by_the_first_layer_and_again_where_its_tensor_holds_another(
    monkeypatch,
) -> None:
    read = []
    monkeypatch.setattr(
        compiled, "layout_of", lambda mask, window: read.append(window) or layout_of(mask, window)
    )
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    query = torch.zeros(1, 4, 70, 64)
    first, again, slides = (compiled._told(query, mask, window) for window in (None, None, 7))
    assert read == [None, 7]
    assert first.tokens is again.tokens and first.tokens.ranges == ((0, 70),)
    # A window's layer is told what its own mask says: this one has none.
    assert slides is mask
    mask[..., :9] = False
    assert compiled._told(query, mask, None).tokens.ranges == ((9, 70),)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_a_mask_says_which_sequences_it_is_of(window) -> None:
    place = torch.arange(40)
    causal = (place <= place[:, None]) & (place > place[:, None] - (window or 40))

    def within(*sequences: tuple[int, int]) -> torch.Tensor:
        number = torch.full((40,), -1)
        for at, (begin, end) in enumerate(sequences):
            number[begin:end] = at
        return causal & (number == number[:, None]) & (number >= 0)

    def layout(*rows: torch.Tensor) -> Layout | None:
        return layout_of(torch.stack(rows)[:, None], window)

    found = layout(causal, within((9, 40)), within((0, 31)), within())
    if window == 1:
        # Each token sees itself alone, so that nothing tells a sequence from tokens.
        assert found is None
        return
    assert found == Layout(0, 40, 40, ((0, 40), (9, 40), (0, 31), (0, 0)), window=window)
    assert (
        layout(within((0, 12), (12, 40))) is None
        and layout(causal, within((3, 20), (22, 39))) is None
    )
    # Slots of a static cache behind the prompt.
    found = layout_of(torch.nn.functional.pad(within((4, 40)), (0, 24))[None, None], window)
    assert found == Layout(0, 40, 64, ((4, 40),), window=window)


def test_a_mask_that_says_anything_else_says_nothing() -> None:
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    assert layout_of(causal.float()[None, None], None) is None
    assert layout_of(causal[None, None, 1:], 7) is None
    assert layout_of(causal.T[None, None], None) is None
    assert layout_of(~causal[None, None], None) is None
    assert layout_of(causal.tril(-1)[None, None], None) is None
    holes = causal.clone()
    holes[:, 10:20] = False
    assert layout_of(holes[None, None], None) is None
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(0, 40, (50, 2), generator=generator).tolist():
        other = causal.clone()
        other[tuple(place)] ^= True
        row, column = place
        # A token that does not see itself is none: the others do see it.
        assert row == column == 39 or layout_of(other[None, None], None) is None, place


def test_a_compiled_step_of_training_has_the_same_gradients(
    graphs, build, apply, ids, warnings
) -> None:
    model, prompt = build().train(), ids(200)

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


@pytest.mark.parametrize("own", [False, True], ids=["DynamicCache", "new_cache"])
def test_a_model_compiled_whole_generates_the_same(
    own, maskless, graphs, build, apply, masked, ids
) -> None:
    # A graph of the prompt, one of the first step, and one of steps of any length.
    model, prompt, options = build(), ids(200), OPTIONS | {"max_new_tokens": 3}
    with masked(model):
        expected = model.generate(prompt, **options)
    with apply(model, strict=True) as handle:
        model.forward = torch.compile(model.forward, backend=graphs)
        cache = handle.new_cache() if own else DynamicCache(config=model.config)
        found = model.generate(prompt, past_key_values=cache, **options)
        assert handle.stats()["sparse"] == 2
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("offload", sampled(["never", "packed"], "never"))
def test_compiled_decode_attends_to_every_token_and_says_so(
    offload, graphs, build, decoding, ids, warnings
) -> None:
    model, prompt, options = build(), ids(200), OPTIONS | {"max_new_tokens": 2}
    expected = model.generate(prompt, **options)
    with decoding(model, filter_layers=(0,), dense_layers=()).apply(model) as handle:
        model.forward = torch.compile(model.forward, backend=graphs)
        found = model.generate(prompt, past_key_values=handle.new_cache(offload=offload), **options)
        assert handle.stats()["decode"] == 0
    assert found.tolist() == expected.tolist()
    assert warnings() == ["decode is being compiled: it attends to every token, not to chosen ones"]


def test_a_cache_that_drops_tokens_is_not_compiled(graphs, build, artifact_for, ids) -> None:
    model, prompt, options = build(), ids(200), OPTIONS | {"max_new_tokens": 3}
    section = artifacts.KVCache(
        policies={"stream": artifacts.Streaming(sinks=4, window=60)}, layers=("stream",) * 2
    )
    artifact = artifact_for(model).model_copy(update={"kv_cache": section})
    with Headwise(artifact).apply(model) as handle:
        expected = model.generate(prompt, past_key_values=handle.new_cache(), **options)
        model.forward = torch.compile(model.forward, backend=graphs)
        found = model.generate(prompt, past_key_values=handle.new_cache(), **options)
    assert found.tolist() == expected.tolist()


def test_a_compiled_static_cache_is_said_to_drop_nothing(
    graphs, build, artifact_for, ids, warnings
) -> None:
    model, prompt = build(), ids(20)
    section = artifacts.KVCache(
        policies={"stream": artifacts.Streaming(sinks=4, window=60)}, layers=("stream",) * 2
    )
    artifact = artifact_for(model).model_copy(update={"kv_cache": section})
    expected = model.generate(prompt, **OPTIONS).tolist()
    with Headwise(artifact).apply(model):
        model.forward = torch.compile(model.forward, backend=graphs)
        assert model.generate(prompt, **OPTIONS, cache_implementation="static").tolist() == expected
    assert warnings() == [
        "this cache is not one of new_cache(): it keeps every token, whatever kv_cache says"
    ]
