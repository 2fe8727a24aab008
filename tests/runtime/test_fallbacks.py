"""Unsupported calls run densely and warn once; strict raises instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from artifacts import HeadwiseError
from runtime import LoadedArtifact, apply_dense
from runtime.attention.function import headwise_attention
from runtime.attention.mask import headwise_mask
from runtime.attention.servers import NOT_CAUSAL
from tests.runtime.batches import real_from
from tests.runtime.omnikv import CLOSE
from tests.runtime.tiny import pictured_model


def calls(tokens: Tensor) -> dict[str, dict[str, Any]]:
    """Return arguments, besides 300 tokens, that no pattern supports."""
    length = tokens.shape[1]
    real = torch.ones_like(tokens)
    real[:, 60:70] = 0
    # The first is longer than several windows, so only its bounds distinguish it from the second.
    positions = [torch.arange(part) for part in (210, 20, length - 230)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    flash = collator([{"input_ids": part.tolist()} for part in tokens[0].split((130, 170))])
    types = torch.zeros_like(tokens)
    types[:, 20:50] = 1
    types[:, 130:190] = 1
    by_hand = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    return {
        "holes": {"attention_mask": real},
        "mask by hand": {"attention_mask": by_hand},
        "packed": {"position_ids": torch.cat(positions)[None], "use_cache": False},
        "packed for flash": {k: v for k, v in flash.items() if k not in ("labels", "input_ids")},
        "both ways": {"is_causal": False},
        "position bias": {"position_bias": torch.zeros(1, 4, length, length)},
        "images": {"token_type_ids": types},
    }


CALLS = [
    ("Llama", "holes", NOT_CAUSAL),
    ("Llama", "mask by hand", NOT_CAUSAL),
    ("Llama", "packed", NOT_CAUSAL),
    ("Gemma3", "packed", NOT_CAUSAL),
    ("Llama", "packed for flash", "cu_seq_lens alone"),
    ("Llama", "both ways", "not causal"),
    ("Llama", "position bias", "position bias"),
    ("pictured", "images", NOT_CAUSAL),
]


@pytest.mark.parametrize(("family", "call", "reason"), CALLS)
def test_unsupported_call_is_dense_and_warns_once_or_raises(
    family, call, reason, build, artifact_for, ids, warnings
):
    model = pictured_model("Gemma3") if family == "pictured" else build(family)
    tokens = ids(300)
    arguments = {"input_ids": tokens} | calls(tokens)[call]
    expected = model(**arguments).logits
    if call not in ("mask by hand", "position bias"):
        causal = model(input_ids=tokens).logits
        assert (causal - expected).abs().max() > 0.01
    headwise = LoadedArtifact(artifact_for(model))
    with headwise.apply(model, backend="reference") as handle:
        for _ in range(2):
            torch.testing.assert_close(model(**arguments).logits, expected, **CLOSE)
        stats = handle.stats()
        assert stats["sparse"] == 0 and any(reason in name for name in stats["dense"])
        assert len(warnings()) == 1 and reason in warnings()[0]
        model(input_ids=tokens)
        assert handle.stats()["sparse"] == 2
    with headwise.apply(model, strict=True), pytest.raises(HeadwiseError, match=reason[:12]):
        model(**arguments)
    with apply_dense(model):
        torch.testing.assert_close(model(**arguments).logits, expected, **CLOSE)


def test_decode_after_padded_prompt_with_images_matches_dense(artifact_for, ids):
    model, prompt, skipped = pictured_model("Gemma3"), ids(300), 40
    short = torch.nn.functional.pad(prompt[:, :-skipped], (skipped, 0))
    types = calls(prompt)["images"]["token_type_ids"]
    later = torch.nn.functional.pad(types[:, :-skipped], (skipped, 0))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    options |= {
        "token_type_ids": torch.cat([types, later]),
        "attention_mask": real_from(300, 0, 40),
    }
    tokens = torch.cat([prompt, short])
    expected = model.generate(tokens, **options)
    with LoadedArtifact(artifact_for(model)).apply(model, backend="auto") as handle:
        actual = model.generate(tokens, past_key_values=handle.new_cache(), **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("family", "before", "padding"),
    [("Llama", "sdpa", 20), ("Llama", "eager", None), ("Gemma3", "eager", 20)],
)
def test_attention_weights_match_eager(family, before, padding, build, apply, ids, warnings):
    model, prompt = build(family), ids(160, batch=2)
    real = None if padding is None else real_from(162, padding, 0)

    def run():
        """Run a prompt and two tokens after it."""
        options = {"output_attentions": True, "past_key_values": DynamicCache(config=model.config)}
        chunks = {160: prompt, 161: prompt[:, :1], 162: prompt[:, 1:2]}
        return [
            model(chunk, attention_mask=None if real is None else real[:, :end], **options)
            for end, chunk in chunks.items()
        ]

    model.set_attn_implementation("eager")
    expected = run()
    model.set_attn_implementation(before)
    with apply(model) as handle:
        actual = run()
        assert handle.stats()["sparse"] == 0
        run()
    for mine, theirs in zip(actual, expected, strict=True):
        assert len(mine.attentions) == model.config.num_hidden_layers
        assert all(map(torch.equal, mine.attentions, theirs.attentions))
        torch.testing.assert_close(mine.logits[1], theirs.logits[1])
    assert len(warnings()) == 1 and "weights" in warnings()[0]
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="attention weights"):
        model(prompt, output_attentions=True)


def test_dropout_of_a_model_in_evaluation_mode_is_dense(build, apply, ids, warnings):
    model, prompt = build(attention_dropout=0.5), ids(200)
    with apply(model) as handle:
        attention = model.model.layers[0].self_attn
        query, key = torch.randn(1, 4, 200, 64), torch.randn(1, 2, 200, 64)
        mask = headwise_mask(1, 200, 200, config=model.config)
        headwise_attention(attention, query, key, key, mask, dropout=0.5)
        assert handle.stats() == {"sparse": 0, "dense": {"attention dropout is on": 1}}
        model(prompt)
        assert handle.stats()["sparse"] == 2
    assert warnings() == ["serving densely: attention dropout is on"]


def test_sparse_prefill_builds_no_mask(build, apply, ids, monkeypatch):
    lengths = []

    def counted(**arguments):
        lengths.append(arguments["q_length"])
        return sdpa_mask(**arguments)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", counted)
    model, tokens, real = build(), ids(200, batch=2), real_from(200, 50, 0)
    with apply(model, strict=True):
        model(tokens, attention_mask=real)
        assert lengths == []
    with apply(model), torch.enable_grad():
        model(tokens, attention_mask=real)
        assert lengths == [200]


def test_prefill_with_unplanned_heads_is_dense(build, apply, warnings):
    model = build()
    query = torch.randn(1, 2, 200, 64)
    key = torch.randn(1, 1, 200, 64)
    with apply(model) as handle:
        mask = headwise_mask(1, 200, 200, config=model.config)
        attention = model.model.layers[0].self_attn
        actual, _ = headwise_attention(attention, query, key, key, mask)
        assert handle.stats()["sparse"] == 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, key, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    assert len(warnings()) == 1 and "(2, 1)" in warnings()[0] and "(4, 2)" in warnings()[0]


def test_short_chunk_with_custom_mask_does_not_warn(build, apply, ids, warnings, monkeypatch):
    monkeypatch.setattr("runtime.attention.context.MIN_BEHIND_A_PAST", 128)
    model = build()
    cache = DynamicCache(config=model.config)
    mask = torch.ones(100, 300, dtype=torch.bool).tril(200)[None, None]
    with apply(model) as handle:
        model(ids(200), past_key_values=cache, use_cache=True)
        model(ids(100, seed=1), past_key_values=cache, attention_mask=mask)
        assert handle.stats() == {"sparse": 2, "dense": {"short": 2}}
    assert warnings() == []
