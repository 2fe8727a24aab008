"""Caches: chunked prefill, static slots, generation with and without a cache, beams."""

import io
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kernels.patterns import LayerPlan
from runtime import Headwise

CLOSE = {"atol": 2e-4, "rtol": 1e-3}
OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def chunked(model, prompt, chunks, cache):
    logits, at = [], 0
    for chunk in chunks:
        logits.append(
            model(prompt[:, at : at + chunk], past_key_values=cache, use_cache=True).logits
        )
        at += chunk
    assert at == prompt.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("chunks", [(100, 100, 100), (70, 64, 166), (200, 36, 64), (299, 1)])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_sparse_chunk_sees_the_whole_past(family, chunks, build, apply, masked, ids):
    model, prompt = build(family), ids(300)
    with masked(model):
        expected = chunked(model, prompt, chunks, DynamicCache(config=model.config))
    with apply(model, strict=True) as handle:
        found = chunked(model, prompt, chunks, DynamicCache(config=model.config))
        assert handle.stats()["sparse"] > 0
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_dense_artifact_in_chunks_is_the_whole_prompt(family, build, apply, ids):
    model, prompt = build(family), ids(300)
    expected = model(prompt).logits
    with apply(model, dense=True, strict=True):
        found = chunked(model, prompt, (100, 130, 70), DynamicCache(config=model.config))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("chunks", [(200,), (90, 110), (130, 10, 60)])
def test_static_cache_slots_beyond_the_prompt_are_not_seen(chunks, build, apply, ids):
    model, prompt = build(), ids(200)
    with apply(model, strict=True) as handle:
        expected = chunked(model, prompt, chunks, DynamicCache(config=model.config))
        before = handle.stats()["sparse"]
        found = chunked(model, prompt, chunks, StaticCache(config=model.config, max_cache_len=320))
        assert handle.stats()["sparse"] == 2 * before > 0
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_dense_chunk_in_static_slots_sees_what_sdpa_shows_it(build, apply, ids, monkeypatch):
    model, prompt = build(), ids(300)
    expected = chunked(
        model, prompt, (100, 200), StaticCache(config=model.config, max_cache_len=320)
    )
    monkeypatch.setattr(
        "kernels.dispatch.why_slow", lambda *qkv: "no fast kernel: cpu: no compiler"
    )
    with apply(model, backend="auto"):
        found = chunked(
            model, prompt, (100, 200), StaticCache(config=model.config, max_cache_len=320)
        )
    assert torch.equal(found, expected)


def test_short_prompt_in_a_long_static_cache_is_dense_and_silent(build, apply, ids, warnings):
    model, prompt = build(), ids(100)
    expected = model(
        prompt, past_key_values=StaticCache(config=model.config, max_cache_len=320)
    ).logits
    with apply(model, strict=True) as handle:
        found = model(
            prompt, past_key_values=StaticCache(config=model.config, max_cache_len=320)
        ).logits
        assert handle.stats() == {"sparse": 0, "dense": {"short": 2}}
    assert torch.equal(found, expected) and not warnings()


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 100},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_generate(how, family, build, apply, masked, ids):
    model, prompt = build(family), ids(200)
    same = dict(how)
    same.pop("cache_implementation", None)
    with masked(model):
        expected = model.generate(prompt, **OPTIONS, **same)
    with apply(model, strict=True) as handle:
        found = model.generate(prompt, **OPTIONS, **how)
        assert handle.stats()["sparse"] > 0
    assert found.tolist() == expected.tolist()


def test_several_turns_on_one_cache(build, apply, masked, ids):
    model, first, second = build(), ids(150), ids(80, seed=1)

    def turns():
        cache = DynamicCache(config=model.config)
        spoken = model.generate(first, past_key_values=cache, **OPTIONS)
        return model.generate(torch.cat([spoken, second], 1), past_key_values=cache, **OPTIONS)

    with masked(model):
        expected = turns()
    with apply(model, strict=True):
        assert turns().tolist() == expected.tolist()


@pytest.mark.parametrize(("new", "count"), [(127, 0), (128, 2)])
def test_short_turns_behind_a_past_are_dense(new, count, build, apply, ids, monkeypatch):
    monkeypatch.setattr("runtime.attention.state.MIN_BEHIND_A_PAST", 128)
    model, first, second = build(), ids(150), ids(new, seed=1)
    with apply(model, strict=True) as handle:
        cache = DynamicCache(config=model.config)
        model(first, past_key_values=cache)
        model(second, past_key_values=cache)
        assert handle.stats()["sparse"] == 2 + count


@pytest.mark.parametrize("dump", ["pickle", "torch"])
@pytest.mark.parametrize("selector", [None, "last", "uniform"])
@pytest.mark.parametrize("offload", ["never", "packed"])
def test_a_cache_that_was_used_can_be_pickled(
    offload, selector, dump, build, artifact_for, decoding, ids
):
    """The keys of OmniKV's filter layers, and of caches that grow, named their layer by a reference
    that cannot be."""
    model, prompt, forced = build(num_hidden_layers=6), ids(150), ids(6, seed=9)
    loaded = (
        Headwise(artifact_for(model)) if selector is None else decoding(model, selector=selector)
    )
    with loaded.apply(model) as handle:
        cache = handle.new_cache(offload=offload)
        chunked(model, torch.cat([prompt, forced[:, :3]], dim=1), (150, 1, 1, 1), cache)
        file = io.BytesIO()
        if dump == "pickle":
            again = pickle.loads(pickle.dumps(cache))
        else:
            torch.save(cache, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
        expected = chunked(model, forced[:, 3:], (1, 1, 1), cache)
        assert torch.equal(chunked(model, forced[:, 3:], (1, 1, 1), again), expected)
        assert again.get_seq_length() == 156


def test_a_turn_that_is_all_tail_builds_no_index(build, artifact_for, ids, monkeypatch):
    """Every one of its queries sees every key in any case: dense attention says the same, without
    choosing first."""
    model, prompt, turns = (
        build(),
        ids(200),
        {64: ids(64, seed=1), 80: ids(80, seed=2), 81: ids(81, seed=3)},
    )
    artifact = artifact_for(model)
    artifact = artifact.model_copy(
        update={"prefill": artifact.prefill.model_copy(update={"dense_tail": 80})}
    )
    builds, former = [], LayerPlan.build
    monkeypatch.setattr(
        LayerPlan, "build", lambda self, *a, **k: builds.append(1) or former(self, *a, **k)
    )
    for length, turn in turns.items():
        with Headwise(artifact).apply(model) as handle:
            cache = handle.new_cache()
            model(prompt, past_key_values=cache)
            before = handle.stats()
            builds.clear()
            found = model(turn, past_key_values=cache).logits
            sparse = handle.stats()["sparse"] - before["sparse"]
        assert sparse == len(builds) == (2 if length == 81 else 0)
        if length < 81:
            cache = DynamicCache(config=model.config)
            with Headwise(artifact).apply(model):
                model(prompt, past_key_values=cache)
            torch.testing.assert_close(found, model(turn, past_key_values=cache).logits, **CLOSE)
