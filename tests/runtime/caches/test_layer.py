"""The cache layer with policies: prompt patterns, refusals, and crops."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import artifacts
from artifacts import H2O, Full, HeadwiseError, SnapKV, Streaming
from runtime import LoadedArtifact, memory_report
from runtime.caches.snapkv import _warn_short
from tests.runtime.batches import fed, real_from
from tests.runtime.omnikv import CLOSE

STREAM = Streaming(sinks=2, window=14)


def test_long_prompt_is_sparse_if_heads_keep_all_tokens(build, keeping, apply, ids):
    model, tokens = build(num_key_value_heads=4, num_hidden_layers=1), ids(200)
    names = ["vs_70_70", "a_64_64", "bs_2", "a_64_64"]
    # The prompt fits in the stream's window, so all heads see all tokens that the patterns allow.
    table = {"full": Full(), "stream": Streaming(sinks=2, window=500)}
    headwise = keeping(model, table, rows=[("full", "stream", "full", "full")], patterns=[names])
    with headwise.apply(model, backend="reference") as handle:
        actual = model(tokens, past_key_values=handle.new_cache()).logits
        assert handle.stats() == {"sparse": 1, "kept": 1, "dense": {}}
    expected_rows = [[names[0], "dense", names[2], names[3]]]
    with apply(model, rows=expected_rows, strict=True):
        torch.testing.assert_close(actual, model(tokens).logits, **CLOSE)


@pytest.mark.parametrize(
    ("policy", "sizes", "min_length", "sparse", "retained"),
    [
        (Full(), (100, 130, 69, 1), 64, 2, 300),
        # The second chunk is long enough, the third is not.
        (Full(), (100, 128, 127, 1), 128, 1, 356),
        (SnapKV(budget=40, window=16), (200,), 64, 1, 40),
    ],
)
def test_chunks_are_as_sparse_as_without_policy(
    policy, sizes, min_length, sparse, retained, build, keeping, apply, ids, monkeypatch
):
    """Chunks of 64 to 127 tokens after a past are dense: patterns would be slower."""
    monkeypatch.setattr("runtime.attention.context.MIN_BEHIND_A_PAST", min_length)
    model, tokens = build(), ids(sum(sizes))
    rows = [["vs_70_70", "a_64_64", "bs_2", "a_64_64"]] * 2
    with apply(model, rows=rows, strict=True) as handle:
        expected = fed(model, tokens, sizes, handle.new_cache())
        assert handle.stats()["sparse"] == 2 * sparse
    with keeping(model, policy, patterns=rows).apply(model, backend="reference") as handle:
        cache = handle.new_cache()
        actual = fed(model, tokens, sizes, cache)
        assert handle.stats() == {"sparse": 2 * sparse, "kept": 2 * len(sizes), "dense": {}}
        assert [layer.cached for layer in memory_report(cache).layers] == [retained, retained]
        model(tokens[:, :1], past_key_values=cache)
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_policy_cache_rejects_model_without_artifact(build, keeping, ids):
    model = build()
    cache = keeping(model, STREAM).new_cache(model)
    with pytest.raises(HeadwiseError, match="apply the artifact to the model"):
        model(ids(4), past_key_values=cache)


def test_unsupported_call_raises_and_invalidates_cache(build, keeping, ids):
    model, hand_made = build(), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with keeping(model, STREAM).apply(model) as handle:
        for options, why in (
            ({"output_attentions": True}, "attention weights were asked for"),
            ({"attention_mask": hand_made}, "the mask is not causal"),
        ):
            cache = handle.new_cache()
            with pytest.raises(HeadwiseError, match=f"cannot serve this call: {why}"):
                model(ids(4), past_key_values=cache, **options)
            with pytest.raises(HeadwiseError, match="holds tokens that no attention saw"):
                model(ids(4), past_key_values=cache)
            cache.reset()
            model(ids(4), past_key_values=cache)


def test_mask_with_hole_in_past_is_rejected(build, keeping, ids):
    """If the hole were ignored, queries would attend to masked tokens."""
    model, tokens, more = build(), ids(20, batch=2), ids(1, batch=2, seed=3)
    real = real_from(21, 0, 3)
    with keeping(model, STREAM).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, tokens, (20,), cache, attention_mask=real[:, :20])
        # More tokens than were cached, or the same number of other tokens.
        for moved in ((4, 5), (1, 4), (5, 8)):
            other = real.clone()
            other[1] = 1
            other[1, slice(*moved)] = 0
            with pytest.raises(
                HeadwiseError,
                match="the attention mask leaves out tokens that the cache has taken in",
            ):
                model(more, past_key_values=copy.deepcopy(cache), attention_mask=other)
        model(more, past_key_values=cache, attention_mask=real)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        third = ids(1, batch=3)
        with pytest.raises(HeadwiseError, match="the attention mask leaves out tokens"):
            model(third, past_key_values=copy.deepcopy(cache), attention_mask=torch.ones(3, 22))
        selected = torch.cat([real, real[:, -1:]], dim=1)[[1, 0, 1]]
        model(third, past_key_values=cache, attention_mask=selected)


@pytest.mark.parametrize(
    "cache_class", [lambda config: StaticCache(config=config, max_cache_len=40), DynamicCache]
)
def test_other_cache_warns_that_no_tokens_are_dropped(cache_class, build, keeping, ids, warnings):
    model, tokens = build(), ids(20)
    with keeping(model, STREAM).apply(model):
        model(tokens, use_cache=False)
        assert not warnings()
        cache = cache_class(config=model.config)
        model(tokens, past_key_values=cache)
        model(tokens[:, :1], past_key_values=cache)
    assert warnings() == [
        "this cache is not one of new_cache(): it keeps every token, whatever kv_cache says"
    ]


def test_policy_rejects_layer_that_reads_shared_cache(build, keeping, ids, monkeypatch):
    model = build()
    with keeping(model, STREAM).apply(model) as handle:
        cache = handle.new_cache()
        update = type(cache.layers[0]).update
        updates = []

        def shared(layer, *args, **kwargs):
            # The second layer has no keys.
            if layer is cache.layers[0]:
                updates.append(update(layer, *args, **kwargs))
            return updates[0]

        monkeypatch.setattr(type(cache.layers[0]), "update", shared)
        with pytest.raises(HeadwiseError, match="two layers read one layer's keys and values"):
            model(ids(4), past_key_values=cache)


def test_omnikv_layers_combine_with_dropping_layers(build, decoding, ids):
    model, tokens = build(num_hidden_layers=6), ids(120)
    omnikv = decoding(model)
    rows = [STREAM.model_copy(update={"window": 400}), *[Full()] * 5]
    section = artifacts.KVCache(
        policies={"s": rows[0], "full": Full()}, layers=("s", *["full"] * 5)
    )
    both = LoadedArtifact(artifacts.Artifact(**{**dict(omnikv.artifact), "kv_cache": section}))
    with omnikv.apply(model) as handle:
        expected = fed(model, tokens, (100, 1), handle.new_cache())
    with both.apply(model) as handle:
        actual = fed(model, tokens, (100, 1), handle.new_cache())
        assert handle.stats()["decode"] > 0
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_crop_removes_generated_tokens_but_not_compressed_prompt(build, keeping, ids):
    model, tokens = build(), ids(100)
    with keeping(model, SnapKV(budget=20, window=8)).apply(model) as handle:
        expected = fed(model, tokens, (70, 1), handle.new_cache())
        cache = handle.new_cache()
        fed(model, torch.cat([tokens[:, :80], ids(9, seed=3)], dim=1), (70, 1), cache)
        cache.crop(-9)
        torch.testing.assert_close(
            fed(model, tokens[:, 80:], (1,), cache), expected[:, 80:], **CLOSE
        )
        with pytest.raises(HeadwiseError, match="cannot take 31 tokens back"):
            cache.crop(-31)
        assert [layer.cached for layer in memory_report(cache).layers] == [50, 50]


def test_crop_removes_uncompressed_prompt(build, keeping, ids):
    model, tokens = build(), ids(100)
    with keeping(model, SnapKV(budget=1.0, window=8)).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, tokens, (50, 1, 40), cache)
        cache.crop(-60)
        for state in (layer.policies[0] for layer in cache.layers):
            assert (state.seen, state.cached) == ((40,), (40,))
        actual = fed(model, tokens[:, 40:], (10,), cache)
    torch.testing.assert_close(actual, model(tokens).logits[:, 40:], **CLOSE)


@pytest.mark.parametrize(
    "policies", [{"it": STREAM}, {"it": STREAM, "h2o": H2O(heavy=3, recent=4)}]
)
def test_decode_step_serves_sequences_with_a_token(policies, build, keeping, ids):
    """Cover sequences of different lengths, one not started, one that ends early, and one or two
    policies."""
    model, tokens = build(num_hidden_layers=1), ids(34, batch=4)
    real = real_from(34, 0, 9, 25, 18)
    real[3, 26:] = 0
    rows = [tuple(policies)] if len(policies) > 1 else None
    with keeping(model, policies, rows=rows).apply(model) as handle:
        cache = handle.new_cache()
        actual = fed(model, tokens, (20, 1), cache, attention_mask=real)
        # The ended sequence is separate.
        assert len(cache.layers[0].policies) == 2 * len(policies)
        for row, mask in enumerate(real):
            mine = mask.nonzero()[:, 0]
            first = max(20 - int(mine[0]), 1)
            alone = fed(model, tokens[row, mine][None], (first, 1), handle.new_cache())
            torch.testing.assert_close(actual[row, mine], alone[0], **CLOSE)
        cache.batch_select_indices(torch.tensor([2, 0]))
        more = torch.ones(2, 36, dtype=torch.long)
        more[:, :34] = real[[2, 0]]
        again = fed(model, ids(2, batch=2), (1,), cache, attention_mask=more)
    assert again.isfinite().all()


def test_apply_rehearsal_is_not_counted_and_keeps_no_state(build, keeping):
    model = build("SmolLM3")
    calls = []
    hook = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    headwise = keeping(model, Streaming(sinks=4, window=12))
    with headwise.apply(model) as handle:
        assert handle.stats() == {"sparse": 0, "kept": 0, "dense": {}}
        caches = [handle.new_cache() for _ in range(3)]
        assert handle.stats() == {"sparse": 0, "kept": 0, "dense": {}}
        # A model is rehearsed only once.
        assert len(calls) == 1
        for cache in caches:
            assert cache.get_seq_length() == 0
    with headwise.apply(model):
        assert len(calls) == 1
    hook.remove()


@pytest.mark.parametrize("size", [12, 40])
def test_snapkv_in_chunks_below_its_window_warns_once(size, build, keeping, ids, warnings):
    _warn_short.cache_clear()
    model = build()
    with keeping(model, SnapKV(budget=100, window=64)).apply(model) as handle:
        whole, chunks, short = (handle.new_cache() for _ in range(3))
        fed(model, ids(240), (200, 40), whole)
        fed(model, ids(90), (40,), short)
        assert not warnings(), "a short last chunk, and a prompt within the budget"
        fed(model, ids(240), (size,), chunks)
        fed(model, ids(240), (size,), handle.new_cache())
    kept = [memory_report(cache).layers[0].cached for cache in (whole, chunks)]
    assert kept == [140, 240]
    (line,) = warnings()
    assert "snapkv has kept every token: no call was as long as its window of 64 tokens" in line


def test_rotation_that_changes_with_length_depends_on_chunks_like_dynamic_cache(
    build, keeping, ids
):
    model = build("Phi3LongRoPE", original_max_position_embeddings=128)
    policy = Streaming(sinks=4, window=300, positions="original")
    sizes = (220,), (100, 60)
    expected = [fed(model, ids(220), each, DynamicCache(config=model.config)) for each in sizes]
    with keeping(model, policy).apply(model) as handle:
        actual = [fed(model, ids(220), each, handle.new_cache()) for each in sizes]
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert (expected[0] - expected[1]).abs().max() > 1


def test_packed_prompts_are_apart_without_mask_and_cache_only(build, apply, ids):
    model, parts = build(), (ids(150), ids(130))
    row = torch.cat(parts, dim=1)
    positions = torch.cat([torch.arange(150), torch.arange(130)])[None]
    alone = torch.cat([model(part).logits for part in parts], dim=1)
    ones = {"attention_mask": torch.ones_like(row), "use_cache": False}
    together = model(row, position_ids=positions, **ones).logits
    with apply(model, dense=True):
        packed = model(row, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed, alone, **CLOSE)
        for more in (ones, {"use_cache": True}):
            actual = model(row, position_ids=positions, **more).logits
            torch.testing.assert_close(actual, together, **CLOSE)
    assert (together - alone).abs().max() > 1
