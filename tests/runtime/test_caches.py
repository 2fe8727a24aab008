"""Caches: chunked prefill, static slots, turns, and caches that are pickled."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kernels.patterns import LayerPlan
from runtime import Headwise
from tests.runtime.batches import fed
from tests.runtime.omnikv import CLOSE


@pytest.mark.parametrize(
    ("family", "chunks"),
    [("Llama", (70, 64, 166)), ("Llama", (200, 36, 64)), ("Gemma3", (100, 130, 69, 1))],
)
def test_a_sparse_chunk_sees_the_whole_past(family, chunks, build, apply, masked, ids):
    """Slots of a static cache that are not filled yet are not seen."""
    model, prompt = build(family), ids(300)
    with masked(model):
        expected = fed(model, prompt, chunks, DynamicCache(config=model.config))
    made = [DynamicCache(config=model.config)]
    if family == "Llama":
        made.append(StaticCache(config=model.config, max_cache_len=320))
    for cache in made:
        with apply(model, strict=True) as handle:
            found = fed(model, prompt, chunks, cache)
            assert handle.stats()["sparse"] > 0
        torch.testing.assert_close(found, expected, **CLOSE)


def test_a_later_chunk_is_dense_for_the_sequence_that_is_still_short(build, apply, ids):
    model, tokens = build(), ids(400, batch=2)
    real = torch.ones_like(tokens)
    real[1, :200] = 0
    options = {"strict": True, "dense_below": 305}
    with apply(model, **options) as handle:
        long = fed(model, tokens[:1], (300, 100), DynamicCache(config=model.config))[0]
        short = model(tokens[1:, 200:]).logits[0]
        assert handle.stats()["sparse"] == 2
        cache = DynamicCache(config=model.config)
        together = fed(model, tokens, (300, 100), cache, attention_mask=real)
        assert handle.stats()["sparse"] == 4
    torch.testing.assert_close(together[0], long, **CLOSE)
    torch.testing.assert_close(together[1, 200:], short, **CLOSE)


@pytest.mark.parametrize("lengths", [(100, 200), (100,)], ids=str)
def test_a_dense_chunk_in_static_slots_sees_what_sdpa_shows_it(
    lengths, build, apply, ids, monkeypatch, warnings
):
    def run():
        cache = StaticCache(config=model.config, max_cache_len=320)
        return fed(model, ids(sum(lengths)), lengths, cache)

    model = build()
    expected = run()
    monkeypatch.setattr("kernels.dispatch.why_slow", lambda *_: "no fast kernel: no compiler")
    with apply(model, backend="auto"):
        assert torch.equal(run(), expected)
    # A short prompt in a long cache is nothing to warn of.
    assert len(warnings()) == len(lengths) - 1


@pytest.mark.parametrize(("new", "count"), [(127, 0), (128, 2)])
def test_short_turns_behind_a_past_are_dense(new, count, build, apply, ids, monkeypatch):
    monkeypatch.setattr("runtime.attention.state.MIN_BEHIND_A_PAST", 128)
    model = build()
    with apply(model, strict=True) as handle:
        fed(model, ids(150 + new), (150, new), DynamicCache(config=model.config))
        assert handle.stats()["sparse"] == 2 + count


def test_a_turn_that_is_all_tail_builds_no_index(build, artifact_for, ids, monkeypatch):
    """Every one of its queries sees every key in any case: dense attention says the same, without
    choosing first."""
    model = build()
    artifact = artifact_for(model)
    prefill = artifact.prefill.model_copy(update={"dense_tail": 80})
    builds, former = [], LayerPlan.build

    def counted(self, *args, **options):
        builds.append(1)
        return former(self, *args, **options)

    monkeypatch.setattr(LayerPlan, "build", counted)
    for length in (64, 80, 81):
        with Headwise(artifact.model_copy(update={"prefill": prefill})).apply(model) as handle:
            caches = [handle.new_cache(), DynamicCache(config=model.config)]
            for cache in caches:
                model(ids(200), past_key_values=cache)
            builds.clear()
            before = handle.stats()["sparse"]
            found = model(ids(length, seed=1), past_key_values=caches[0]).logits
            assert handle.stats()["sparse"] - before == len(builds) == (2 if length == 81 else 0)
        if length < 81:
            expected = model(ids(length, seed=1), past_key_values=caches[1]).logits
            torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("selector", "offload"),
    [(None, "never"), ("last", "never"), ("last", "packed"), ("uniform", "packed")],
)
def test_a_cache_that_was_used_can_be_pickled(
    offload, selector, build, artifact_for, decoding, ids
):
    """The keys of OmniKV's filter layers, and of caches that grow, named their layer by a reference
    that cannot be."""
    model, tokens = build(num_hidden_layers=6), ids(156)
    loaded = Headwise(artifact_for(model))
    if selector is not None:
        loaded = decoding(model, selector=selector)
    with loaded.apply(model) as handle:
        cache = handle.new_cache(offload=offload)
        fed(model, tokens[:, :153], (150, 1), cache)
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        copies = [pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)]
        expected = fed(model, tokens[:, 153:], (1,), cache)
        for again in copies:
            assert torch.equal(fed(model, tokens[:, 153:], (1,), again), expected)
            assert again.get_seq_length() == 156
