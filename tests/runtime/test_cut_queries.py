"""Models that cut the queries of some layers to the last ones, whose logits are requested.

Gemma 4 does so in the layers that read the keys and values of other layers, and cuts the mask too.
Gemma 3n shares keys and values without cutting.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention

from runtime import apply_dense
from runtime.attention.applied import forget, remember
from runtime.attention.function import headwise_attention
from runtime.attention.layer import Layer, Settings
from runtime.attention.mask import PrefillMask
from runtime.attention.servers import serve_by_dense_kernel, serve_step
from tests.runtime.batches import real_from
from tests.runtime.omnikv import CLOSE
from tests.runtime.tiny import DENSE_BELOW, GEMMA4_SHARED

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma4": GEMMA4_SHARED,
    "Gemma3n": GEMMA4_SHARED
    | {
        "vocab_size_per_layer_input": 97,
        "config": "Gemma3nTextConfig",
        "head_dim": 64,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
}
WAYS = ["auto", "kernel", "model"]


@pytest.fixture(params=FAMILIES)
def shared(request, build):
    return build(request.param, **FAMILIES[request.param])


@pytest.mark.parametrize(
    ("family", "by"), [*(("Gemma4", by) for by in WAYS), ("Gemma3n", "kernel")]
)
@pytest.mark.parametrize("length", [9, 100])
def test_apply_dense_last_logits_equal_all_logits(family, by, length, build, ids):
    model, prompt = build(family, **FAMILIES[family]), ids(length, batch=2)
    for mask in (None, real_from(length, 0, length // 3)):
        expected = model(prompt, attention_mask=mask).logits
        with apply_dense(model, by=by):
            for count in (1, 8):
                actual = model(prompt, attention_mask=mask, logits_to_keep=count).logits
                torch.testing.assert_close(actual, expected[:, -count:], **CLOSE)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_apply_dense_chunks_and_drafts_equal_whole_prefill(by, cache, build, ids):
    model, tokens = build("Gemma4", **GEMMA4_SHARED), ids(120)
    expected = model(tokens).logits
    with apply_dense(model, by=by) as handle:
        past = handle.new_cache()
        if cache == "static":
            past = StaticCache(config=model.config, max_cache_len=200)
        start = 0
        for width, count in ((70, 3), (30, 2), (5, 4), (1, 1), (9, 9), (5, 1)):
            part = tokens[:, start : start + width]
            start += width
            actual = model(part, past_key_values=past, logits_to_keep=count).logits
            torch.testing.assert_close(actual, expected[:, start - count : start], **CLOSE)


@pytest.mark.parametrize("by", WAYS)
def test_generate_with_drafts_equals_greedy(by, build, ids):
    model = build("Gemma4", **GEMMA4_SHARED)
    prompt = ids(20).repeat(1, 3)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    ways = [{}, {"prompt_lookup_num_tokens": 4}]
    ways += [{"assistant_model": build("Gemma4", seed=n, **GEMMA4_SHARED)} for n in (0, 1)]
    with apply_dense(model, by=by) as handle:
        for more in ways:
            for cache in (None, handle.new_cache()):
                actual = model.generate(prompt, past_key_values=cache, **options, **more)
                assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [0, 70])
def test_apply_shared_layers_builds_no_mask(count, shared, apply, masked, ids, monkeypatch):
    prompt = ids(300)
    with masked(shared):
        expected = shared(prompt).logits
    masks = []
    monkeypatch.setattr(PrefillMask, "_once", lambda mask, may_skip: masks.append(mask.shape))
    with apply(shared, strict=True, backend="auto") as handle:
        actual = shared(prompt, logits_to_keep=count).logits
        assert handle.stats()["sparse"] == 3
    assert not masks
    torch.testing.assert_close(actual, expected[:, -count:], **CLOSE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("queries", [2, 16, 40])
def test_attention_without_mask_aligns_queries_to_last_keys(attention, queries, build):
    """Check also a module without an applied artifact."""
    config = build().config
    module = LlamaAttention(config, 0).eval()
    q, k, v = torch.randn(1, 4, queries, 32), torch.randn(1, 2, 50, 32), torch.randn(1, 2, 50, 32)
    seen = torch.ones(queries, 50, dtype=torch.bool).tril(50 - queries)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, enable_gqa=True
    )
    settings = Settings(dense_below=DENSE_BELOW, model_attention=attention)
    servers = (serve_step, serve_by_dense_kernel)
    for layer in (None, Layer(settings, 0, None, servers=servers)):
        if layer is not None:
            remember(config, {module: layer}, settings)
        actual, _ = headwise_attention(module, q, k, v, None, scaling=32**-0.5)
        forget(config, [module])
        torch.testing.assert_close(actual.transpose(1, 2), expected, **CLOSE)
