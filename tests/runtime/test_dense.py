"""Dense attention: Headwise's kernels where they are faster, with the model's own semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from artifacts import HeadwiseError
from kernels import registry
from kernels.logits import Logits
from runtime import LoadedArtifact, apply_dense
from runtime.attention import dense
from runtime.attention.servers import SLIDES
from tests.runtime.batches import fed, real_from, real_of
from tests.runtime.omnikv import CLOSE

DENSE, WINDOW, DECODE = "dense by kernel", "window by kernel", "decode by kernel"
# Architectures with sinks, soft-caps, wide heads, or layers without positions.
SLIDING = ("Gemma2", "Gemma3", "Gemma3Wide", "Cohere2", "GptOss")


@pytest.fixture(autouse=True)
def _at_any_length(monkeypatch):
    """Lower the kernel's threshold of 256 keys for float32 decode."""
    monkeypatch.setattr("runtime.attention.servers._MIN_KEYS_FLOAT32", 1)


def sliding(model: Any) -> int:
    return list(getattr(model.config, "layer_types", ())).count("sliding_attention")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "left") for family in ("Llama", "Qwen3", "GPTNeoX", "Phi3", *SLIDING)),
        *((family, "right") for family in ("Llama", "Gemma3", "GptOss")),
        ("Gemma3", "129"),
    ],
)
def test_apply_dense_batches_match_model(family, layout, build, ids):
    model, real = build(family), real_of(layout, more=3)
    tokens, sizes = ids(real.shape[1], batch=len(real)), (real.shape[1] - 3, 1)
    options = {"attention_mask": real}
    expected = fed(model, tokens, sizes, **options)
    with apply_dense(model) as handle:
        actual = fed(model, tokens, sizes, **options)
        counts = handle.stats()["dense"]
    torch.testing.assert_close(actual[real > 0], expected[real > 0], **CLOSE)
    layers = model.config.num_hidden_layers
    assert counts[DENSE] == layers - sliding(model)
    assert counts.get(WINDOW, 0) == sliding(model)
    # Tokens after right padding leave holes in their sequences; sinks are not keys.
    if layout != "right" or family == "Llama":
        by_kernel = 0 if layout == "right" or family == "GptOss" else 3 * layers
        assert counts.get(DECODE, 0) == by_kernel


@pytest.mark.parametrize(
    ("cache", "sizes"),
    [("dynamic", (130, 64, 5, 90, 1)), ("static", (200, 64, 1)), ("own", (20, 64, 200, 1))],
)
def test_apply_dense_chunks_and_decode_beyond_window_match_model(cache, sizes, build, ids):
    """The window moves past the padding during decode."""
    model, real = build("Gemma3"), real_from(sum(sizes) + 40, 35, 0, 3)
    tokens = ids(real.shape[1], batch=3)
    options = {"attention_mask": real}
    expected = fed(model, tokens, sizes, **options)
    with apply_dense(model) as handle:
        caches = {
            "dynamic": lambda: DynamicCache(config=model.config),
            "static": lambda: StaticCache(config=model.config, max_cache_len=500),
            "own": handle.new_cache,
        }
        actual = fed(model, tokens, sizes, caches[cache](), **options)
        counts = handle.stats()["dense"]
    torch.testing.assert_close(actual[real > 0], expected[real > 0], **CLOSE)
    assert counts[WINDOW] == sum(size >= 64 for size in sizes)


@pytest.mark.parametrize("drafts", [16, 17])
def test_drafts_match_plain_decode(drafts, build, ids):
    model, tokens = build(), ids(100 + drafts)
    expected = fed(model, tokens, (100, drafts))
    with apply_dense(model) as handle:
        actual = fed(model, tokens, (100, drafts))
        assert handle.stats()["dense"].get(DECODE, 0) == (2 if drafts <= 16 else 0)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize(("length", "padding"), [(9, 0), (127, 0), (200, 100)])
def test_short_prompts_equal_sdpa_bitwise(length, padding, build, artifact_for, ids):
    """Padding longer than the threshold does not make a prompt long."""
    model, prompt = build(), ids(length, batch=2 if padding else 1)
    kwargs = {"attention_mask": real_from(length, padding, padding)} if padding else {}
    expected = model(prompt, **kwargs).logits
    with LoadedArtifact(artifact_for(model)).apply(model) as handle:
        assert torch.equal(model(prompt, **kwargs).logits, expected)
        assert handle.stats() == {"sparse": 0, "dense": {"short": 2}}


def test_short_contexts_use_sdpa_in_float32_only(build, artifact_for, ids, monkeypatch):
    monkeypatch.setattr("runtime.attention.servers._MIN_KEYS_FLOAT32", 256)
    model = build()
    for dtype, length, reason in (
        (torch.float32, 100, "decode"),
        (torch.float32, 260, DECODE),
        (torch.bfloat16, 100, DECODE),
    ):
        model.to(dtype)
        with LoadedArtifact(artifact_for(model, dense=True)).apply(model) as handle:
            fed(model, ids(length + 3), (length, 1), handle.new_cache())
            assert handle.stats()["dense"][reason] == 6


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"dense_kernels": False}),
        ({}, {"backend": "reference"}),
        ({"attn_implementation": "eager"}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_dense_kernel_switched_off_uses_model_attention(
    family, changes, options, build, artifact_for, ids, monkeypatch
):
    monkeypatch.setattr("runtime.attention.servers.faster", lambda *_: "kernel")
    model, tokens = build(family, **changes), ids(303)
    rows = [None] * model.config.num_hidden_layers
    expected = fed(model, tokens, (300, 1))
    with LoadedArtifact(artifact_for(model, rows=rows)).apply(model, **options) as handle:
        actual = fed(model, tokens, (300, 1))
        assert not {DENSE, WINDOW, DECODE} & set(handle.stats()["dense"])
    assert torch.equal(actual, expected)


def test_layer_with_lost_tokens_fails_like_sdpa(build, ids):
    model, prompt, real = build(), ids(100, batch=2), real_from(101, 40, 0)
    cache = DynamicCache(config=model.config)
    model(prompt, attention_mask=real[:, :100], past_key_values=cache)
    lost = cache.layers[1]
    lost.keys, lost.values = lost.keys[:, :, 5:], lost.values[:, :, 5:]
    with apply_dense(model), pytest.raises(RuntimeError, match="size"):
        model(prompt[:, :1], attention_mask=real, past_key_values=cache)


def test_patterns_for_layer_with_mask_window_are_rejected(build, artifact_for, ids):
    """Qwen2-MoE has a window in the mask only, not in its attention call."""
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    small = {"hidden_size": 256, "num_experts": 4, "moe_intermediate_size": 32}
    model, prompt = build("Qwen2Moe", **window, **small), ids(300)
    expected = model(prompt).logits
    headwise = LoadedArtifact(artifact_for(model, rows=[["dense"] * 4] * 2))
    with headwise.apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert handle.stats()["dense"][SLIDES] == sliding(model) > 0
    with headwise.apply(model, strict=True), pytest.raises(HeadwiseError, match="the layer slides"):
        model(prompt)


def random_qkv(q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, q_len, 64), torch.randn(1, 2, k_len, 64), torch.randn(1, 2, k_len, 32)


@pytest.mark.parametrize("by", ["kernel", "sdpa", "auto"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 200), (1000, 1000), (300, 1100)])
@pytest.mark.parametrize("window", [None, 100])
def test_fastest_dense_matches_reference(window, q_len, k_len, by):
    q, k, v = random_qkv(q_len, k_len)
    logits = Logits(scale=0.2, window=window)
    actual = dense.fastest_dense(q, k, v, logits=logits, by=by)
    expected = dense.dense_attention(q, k, v, logits=logits, backend="reference")[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_fastest_dense_softcap_and_sinks_need_kernel():
    q, k, v = random_qkv(100, 100)
    for logits in (Logits(softcap=2.0), Logits(sinks=torch.linspace(-1, 2, 4))):
        expected = dense.dense_attention(q, k, v, logits=logits, backend="reference")[0]
        actual = dense.fastest_dense(q, k, v, logits=logits)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        with pytest.raises(ValueError, match="sdpa has neither a soft-cap nor sinks"):
            dense.fastest_dense(q, k, v, logits=logits, by="sdpa")
    with pytest.raises(ValueError, match="got 'fast'"):
        dense.fastest_dense(q, k, v, by="fast")


def test_faster_selects_by_length_and_device(monkeypatch):
    assert (
        dense.faster(*random_qkv(100, 1023)) == "sdpa"
        and dense.faster(*random_qkv(100, 1024)) == "kernel"
    )
    # The meta device represents a GPU.
    assert dense.faster(*(x.to("meta") for x in random_qkv(4096, 4096))) == "sdpa"
    monkeypatch.setattr(registry, "fast", lambda *_: ("", "no compiler"))
    assert dense.faster(*random_qkv(100, 1024)) == "sdpa"


@pytest.mark.parametrize("by", ["kernel", "model"])
def test_apply_dense_generate_matches_model(by, build, ids):
    model, prompt = build(), ids(100)
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(prompt, **options)
    with apply_dense(model, by=by) as applied:
        cache = applied.new_cache()
        assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)
        assert applied.stats()["dense"].get(DENSE, 0) == (2 if by == "kernel" else 0)
    with pytest.raises(HeadwiseError, match="by must be one of"):
        apply_dense(model, by="magic")
