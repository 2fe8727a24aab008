"""Caches: chunked prefill with growing sizes, static slots, multi-turn use, and pickling."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kernels.patterns import LayerPlan
from runtime import LoadedArtifact, memory_report
from tests.runtime.batches import fed, real_from
from tests.runtime.omnikv import CLOSE


@pytest.mark.parametrize(
    ("family", "chunks", "searched"),
    [
        ("Llama", (70, 64, 166), None),
        ("Llama", (200, 36, 64), None),
        ("Gemma3", (100, 130, 69, 1), None),
        ("Llama", (300,), 128),
        ("Gemma3", (600,), 128),
        ("Llama", (150, 150, 200), 128),
    ],
)
def test_sparse_chunk_attends_to_whole_past(family, chunks, searched, build, apply, masked, ids):
    """Unfilled slots of a static cache are not visible; sizes that grow follow the chunk's keys."""
    model, prompt = build(family), ids(sum(chunks))
    with masked(model, searched=searched):
        expected = fed(model, prompt, chunks)
    caches = [DynamicCache(config=model.config)]
    if family == "Llama":
        caches.append(StaticCache(config=model.config, max_cache_len=520))
    for cache in caches:
        with apply(model, searched=searched, strict=True) as handle:
            actual = fed(model, prompt, chunks, cache)
            assert handle.stats()["sparse"] > 0
        torch.testing.assert_close(actual, expected, **CLOSE)
    if searched is not None:
        with masked(model):
            as_found = fed(model, prompt, chunks)
        assert (as_found - expected).abs().max() > 1e-2


def test_later_chunk_is_dense_for_short_sequence(build, apply, ids):
    model, tokens, real = build(), ids(400, batch=2), real_from(400, 0, 200)
    options = {"strict": True, "dense_below": 305}
    with apply(model, **options) as handle:
        long = fed(model, tokens[:1], (300, 100))[0]
        short = model(tokens[1:, 200:]).logits[0]
        assert handle.stats()["sparse"] == 2
        together = fed(model, tokens, (300, 100), attention_mask=real)
        assert handle.stats()["sparse"] == 4
    torch.testing.assert_close(together[0], long, **CLOSE)
    torch.testing.assert_close(together[1, 200:], short, **CLOSE)


@pytest.mark.parametrize("lengths", [(100, 200), (100,)], ids=str)
def test_dense_chunk_in_static_cache_matches_sdpa(
    lengths, build, apply, ids, monkeypatch, warnings
):
    def run():
        cache = StaticCache(config=model.config, max_cache_len=320)
        return fed(model, ids(sum(lengths)), lengths, cache)

    model = build()
    expected = run()
    monkeypatch.setattr("kernels.registry.fast", lambda *_: ("", "no fast kernel: no compiler"))
    with apply(model, backend="auto"):
        assert torch.equal(run(), expected)
    # A short prompt in a long cache is no reason to warn.
    assert len(warnings()) == len(lengths) - 1


def test_turn_within_dense_tail_builds_no_index(build, artifact_for, ids, monkeypatch):
    """Every query of the turn sees every key, so dense attention needs no selection."""
    model = build()
    artifact = artifact_for(model)
    prefill = artifact.prefill.model_copy(update={"dense_tail": 80})
    builds, former = [], LayerPlan.build

    def counted(self, *args, **options):
        builds.append(1)
        return former(self, *args, **options)

    monkeypatch.setattr(LayerPlan, "build", counted)
    for length in (64, 80, 81):
        with LoadedArtifact(artifact.model_copy(update={"prefill": prefill})).apply(
            model
        ) as handle:
            caches = [handle.new_cache(), DynamicCache(config=model.config)]
            for cache in caches:
                model(ids(200), past_key_values=cache)
            builds.clear()
            before = handle.stats()["sparse"]
            actual = model(ids(length, seed=1), past_key_values=caches[0]).logits
            assert handle.stats()["sparse"] - before == len(builds) == (2 if length == 81 else 0)
        if length < 81:
            expected = model(ids(length, seed=1), past_key_values=caches[1]).logits
            torch.testing.assert_close(actual, expected, **CLOSE)


def test_memory_report_of_a_plain_cache_counts_its_tokens(build, ids):
    model, cache = build("Llama"), DynamicCache()
    fed(model, ids(40), (39, 1), cache)
    report = memory_report(cache)
    assert [(layer.seen, layer.cached) for layer in report.layers] == [(40, 40)] * len(cache.layers)
    assert report.device == sum(x.nbytes for each in cache.layers for x in (each.keys, each.values))
