"""OmniKV's decode and chunked prefill against plain torch over full attention weights.

Keys and values are on the device, or in a bank whose copies are as late as allowed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache

from artifacts import HeadwiseError
from runtime.omnikv import copy_engine
from runtime.omnikv.server import NOT_OURS
from tests.runtime.batches import fed, real_from
from tests.runtime.every_architecture import tiny_causal
from tests.runtime.omnikv import CLOSE, LAYERS, LONGEST_DECODE, oracle

pytestmark = pytest.mark.usefixtures("late")
SLIDING = {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 4}
STEPS, DRAFTS = (150, *(1,) * 8), (150, 4, 1, 5)
SLIDES = {"dense_layers": (0,)}


@pytest.mark.parametrize(
    ("family", "section", "sizes", "backend", "offload"),
    [
        ("Llama", {}, STEPS, "reference", "never"),
        ("Llama", {"selector": "exponential", "budget": 0.125}, STEPS, "reference", "packed"),
        ("Qwen3", {"selector": "uniform"}, STEPS, "reference", "packed"),
        ("Gemma3", {"selector": "exponential"} | SLIDES, STEPS, "reference", "never"),
        ("Gemma3", SLIDES, STEPS, "reference", "packed"),
        ("Yi", {"selector": "uniform"}, STEPS, "reference", "never"),
        # Drafts see themselves and the tokens before them.
        ("Llama", {"budget": 2}, DRAFTS, "auto", "packed"),
        ("Llama", {}, DRAFTS, "auto", "never"),
        # Chunks of a prompt select from its past.
        ("Llama", {"prefill_ratio": 0.25, "window": 6}, (100, 100, 100, 1), "auto", "packed"),
        ("Llama", {"prefill_ratio": 0.9, "window": 6}, (70, 66, 164, 1), "auto", "never"),
        ("Gemma3", {"prefill_ratio": 0.25, "window": 6}, (70, 66, 164, 1), "auto", "packed"),
        ("Gemma3", {"prefill_ratio": 0.25} | SLIDES, (200, 36, 64, 1), "auto", "never"),
    ],
)
def test_chunks_and_steps_match_reference(
    family, section, sizes, backend, offload, build, decoding, ids
):
    more = SLIDING if family == "Gemma3" else {}
    model, tokens = build(family, **LAYERS, **more), ids(sum(sizes))
    loaded = decoding(model, **SLIDES | section if more else section)
    with oracle(model, loaded.artifact.decode.omnikv):
        expected = fed(model, tokens, sizes)
    dense = fed(model, tokens, sizes)
    with loaded.apply(model, backend=backend, strict=True) as handle:
        actual = fed(model, tokens, sizes, handle.new_cache(offload=offload))
        calls = sum(size <= LONGEST_DECODE for size in sizes)
        assert handle.stats()["decode"] == calls * (5 if more else 6)
        if "budget" not in section:
            assert handle.stats()["tokens"] == 24
    torch.testing.assert_close(actual, expected, **CLOSE)
    # The first chunk is dense, and the last one is not, or nothing is tested.
    last = slice(-sizes[-2] - 1, -1)
    torch.testing.assert_close(expected[:, : sizes[0]], dense[:, : sizes[0]], **CLOSE)
    assert (expected - dense)[:, last].abs().max() > 0.05


def test_decode_with_another_cache_is_dense_and_warns_once(build, decoding, ids, caplog):
    model, tokens = build(**LAYERS), ids(156)
    expected = fed(model, tokens, (150, 1))
    loaded = decoding(model)
    other = decoding(model, filter_layers=(3,))
    for cache in (None, other.new_cache(model)):
        caplog.clear()
        with loaded.apply(model, backend="reference") as handle:
            actual = fed(model, tokens, (150, 1), cache)
            assert handle.stats().get("tokens") is None
        torch.testing.assert_close(actual, expected, **CLOSE)
        assert [each.getMessage() for each in caplog.records] == [NOT_OURS]


def test_decode_new_token_copies_no_memory(build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache(offload="never")
        model(ids(150), past_key_values=cache, use_cache=True)
        before = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
        model(ids(1), past_key_values=cache, use_cache=True)
        tensors = [x for layer in cache.layers for x in layer.tensors()]
        kept = [x.data_ptr() for x in tensors if x.dim() == 4]
        assert len(kept) == 12 and set(kept) <= set(before)
        held = sum(t.untyped_storage().nbytes() for t in tensors)
        assert handle.cache_bytes(cache) == (held, 0)


def test_filter_layer_rejects_keys_of_another_length(build, decoding, ids, monkeypatch):
    update = Cache.update

    def shortened(*args, **kwargs):
        return tuple(states[:, :, 1:] for states in update(*args, **kwargs))

    model = build(**LAYERS)
    with decoding(model, selector="uniform").apply(model) as handle:
        cache = handle.new_cache()
        monkeypatch.setattr(Cache, "update", shortened)
        with pytest.raises(HeadwiseError, match="filter layer 2 must attend to the keys of its"):
            model(ids(150), past_key_values=cache, use_cache=True)


def test_cache_used_before_apply_keeps_no_history(build, decoding, ids):
    model, tokens = build(**LAYERS), ids(156)
    loaded = decoding(model, selector="uniform")
    cache = loaded.new_cache(model)
    fed(model, tokens, (150, 1), cache)
    assert cache.layers[2].history is None
    with loaded.apply(model, backend="reference") as handle:
        fed(model, tokens[:, :1], (1,), cache)
        assert handle.stats()["decode"] == 6
    assert cache.layers[2].history.shape[1] == 1


def test_filter_layer_rejects_extra_cached_states_for_earlier_scores(decoding):
    model = tiny_causal("falcon_h1")
    loaded = decoding(model, selector="uniform", filter_layers=(0,), dense_layers=())
    with pytest.raises(HeadwiseError, match=r"selector must be 'last', got 'uniform': .* layer 0"):
        loaded.new_cache(model)
    decoding(model, filter_layers=(0,), dense_layers=()).new_cache(model)


def test_prefill_chunk_fetches_only_selected_rows(build, decoding, ids, monkeypatch):
    staged = []
    former = copy_engine.CopyEngine.staging

    def record(self, rows, *more):
        staged.append(rows)
        return former(self, rows, *more)

    monkeypatch.setattr(copy_engine.CopyEngine, "staging", record)
    monkeypatch.setattr("runtime.omnikv.bank.Bank.read", None)
    model = build(**LAYERS)
    with decoding(model, prefill_ratio=0.5).apply(model, backend="auto") as handle:
        fed(model, ids(300), (120, 100, 80), handle.new_cache(offload="packed"))
    assert staged == [50, 50, 40, 40], "two sparse layers, half a chunk each"


@pytest.mark.parametrize("padded", [True, False])
def test_decode_model_on_two_devices_completes(padded, build, decoding, ids):
    """Use "meta" as the second device.

    It does not mix with the real device and computes no numbers. A forward pass that ends shows
    that all inputs of a layer are on the layer's device.
    """
    model, tokens = build(**LAYERS), ids(153, batch=2)
    loaded, real = decoding(model), real_from(153, 30 * padded, 0)

    def to_meta(module, args, kwargs):
        return tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))

    for part in (*model.model.layers[3:], model.model.norm, model.lm_head):
        part.to("meta").register_forward_pre_hook(to_meta, with_kwargs=True)
    # No kernel computes on "meta": the reference is asked for by name.
    with loaded.apply(model, check_weights=False, backend="reference") as handle:
        fed(model, tokens, (150, 1), handle.new_cache(), attention_mask=real)
        # Six layers in three steps: 2 and 4 filter, 3 and 5 are served, over both devices.
        assert handle.settings.calls.total()["chosen"] == 3 * 6
