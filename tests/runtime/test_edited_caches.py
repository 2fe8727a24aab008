"""Caches whose keys and values are edited from outside: as a DynamicCache, or one error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import artifacts
from artifacts import HeadwiseError
from runtime import LoadedArtifact, memory_report
from tests.runtime.batches import fed
from tests.runtime.conftest import POLICIES
from tests.runtime.omnikv import CLOSE, LAYERS, oracle

pytestmark = pytest.mark.usefixtures("late")
LENGTH = 150
# Layers of a decode section: plain, filter layers with and without scores, layers in banks.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "on the device": ({}, "never"),
    "packed": ({}, "packed"),
    "with scores": ({"selector": "uniform", "window": 3}, "packed"),
}


def shorten(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 40:], layer.values[:, :, 40:]


def shorten_values_first(cache: Any) -> None:
    for layer in cache.layers:
        layer.values = layer.values[..., 40:, :].clone()
        layer.keys = layer.keys[..., 40:, :].clone()


def edit_in_place(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys[..., -1, :] = 0.5
        layer.values[:, :, 3:9].zero_()
        # Not equal: of tokens that are attended to alike any may be selected.
        layer.keys[:, :, 20:25].copy_(layer.keys[:, :, 10:15] * 1.1)


def widen(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.double() * 2, layer.values.double()


def keep_first_sequence_twice(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[:1].expand(2, -1, -1, -1)
        layer.values = layer.values[:1].expand(2, -1, -1, -1)


def replace_layers(cache: Any) -> None:
    for number in (2, 3):
        new = DynamicLayer()
        new.update(cache.layers[number].keys * 0.9, cache.layers[number].values)
        cache.layers[number] = new


def fill_from_elsewhere(cache: Any) -> None:
    torch.manual_seed(3)
    for layer in cache.layers:
        layer.keys = torch.randn(2, 2, 77, 64)
        layer.values = torch.randn(2, 2, 77, 64)


def clear(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys = layer.values = torch.tensor([])


def select_by_mask_and_from_the_end(cache: Any) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    cache.batch_select_indices(torch.tensor([-1, 0]))


def reorder_one_layer_on_the_device(cache: Any) -> None:
    cache.layers[0].reorder_cache(torch.tensor([1, 0]))
    cache.layers[2].batch_select_indices([1, 0])


def crop_and_edit(cache: Any) -> None:
    cache.crop(-7)
    cache.layers[3].keys[:, :, :5] += 1.0


EDITS: dict[str, Callable[[Any], Any]] = {
    "shorten": shorten,
    "shorten the values first": shorten_values_first,
    "edit in place": edit_in_place,
    "zero layer 1": lambda cache: cache.layers[1].keys.zero_(),
    "scale a sparse layer": lambda cache: cache.layers[5].values.mul_(3.0),
    "widen": widen,
    "keep the first sequence twice": keep_first_sequence_twice,
    "replace layers": replace_layers,
    "fill from elsewhere": fill_from_elsewhere,
    "clear": clear,
    "select by mask and from the end": select_by_mask_and_from_the_end,
    "reorder a layer on the device": reorder_one_layer_on_the_device,
    "crop and edit": crop_and_edit,
}


def continued(model: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Logits of four single tokens and a chunk, all at positions from 300 on."""
    outs = []
    begin = 0
    for size in (1, 1, 1, 1, 70):
        positions = torch.arange(300 + begin, 300 + begin + size)[None]
        chunk = tokens[:, begin : begin + size]
        outs.append(model(chunk, past_key_values=cache, position_ids=positions).logits)
        begin += size
    return torch.cat(outs, dim=1)


def on_both(
    model: Any, loaded: LoadedArtifact, offload: str, use: Callable[[Any], Tensor], **how: Any
) -> list[Tensor]:
    """Use a DynamicCache with selection in plain torch, and a cache of new_cache() with ours."""
    section = loaded.artifact.decode.omnikv.model_copy(update={"selector": "last"})
    with oracle(model, section):
        expected = use(DynamicCache(config=model.config))
    with loaded.apply(model, **how) as handle:
        return [use(handle.new_cache(offload=offload)), expected]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("way", WAYS)
def test_edited_cache_continues_like_dynamic_cache(way, edit, build, decoding, ids):
    section, offload = WAYS[way]
    model, tokens = build(**LAYERS), ids(74, batch=2, seed=1)
    # With every token selected the selectors agree, and other edits would not show.
    options = section | ({} if "selector" not in section else {"budget": 0.9999})
    lengths = []

    def use(cache: Any) -> Tensor:
        fed(model, ids(LENGTH, batch=2), (LENGTH,), cache)
        EDITS[edit](cache)
        out = continued(model, cache, tokens)
        lengths.append(cache.get_seq_length())
        return out

    outs = on_both(model, decoding(model, **options), offload, use, strict=True)
    torch.testing.assert_close(*outs, **CLOSE)
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("offload", ["never", "packed"])
def test_tensors_read_before_are_detached_like_dynamic_cache(offload, build, decoding, ids):
    """Editing a tensor that was read before the last token has no effect; nor do later tokens."""
    model, tokens = build(**LAYERS), ids(80, batch=2, seed=1)

    def use(cache: Any) -> Tensor:
        fed(model, ids(LENGTH, batch=2), (LENGTH,), cache)
        saved = [(layer.keys, layer.values) for layer in cache.layers]
        fed(model, tokens[:, :3], (1,), cache)
        longer = [(layer.keys, layer.values) for layer in cache.layers]
        cache.crop(-3)
        first = continued(model, cache, tokens)
        for layer, (keys, values) in zip(cache.layers, longer, strict=True):
            layer.keys, layer.values = keys, values
        for keys, _ in saved:
            keys.zero_()
        return torch.cat([first, continued(model, cache, tokens)])

    torch.testing.assert_close(*on_both(model, decoding(model), offload, use), **CLOSE)


@pytest.mark.parametrize("edit", [shorten, edit_in_place], ids=lambda edit: edit.__name__)
def test_edited_keys_drop_scores_of_earlier_queries(edit, build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model, selector="uniform", window=3).apply(model) as handle:
        cache = handle.new_cache(offload="packed")
        fed(model, ids(LENGTH), (LENGTH, 1), cache)
        history = cache.layers[2].history
        assert cache.layers[2].keys is not None
        fed(model, ids(1), (1,), cache)
        assert torch.equal(cache.layers[2].history[:, :-1, :-1], history), "only read"
        edit(cache)
        fed(model, ids(1), (1,), cache)
        length = cache.get_seq_length()
        assert cache.layers[2].history.shape == (1, 1, length)


def test_banked_layer_returns_to_bank_after_edit(build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache(offload="packed")
        fed(model, ids(LENGTH), (LENGTH, 1), cache)
        banked = handle.cache_bytes(cache)
        shorten(cache)
        edited = memory_report(cache)
        assert edited.bank == 0 and [layer.cached for layer in edited.layers] == [110] * 6
        fed(model, ids(2), (1,), cache)
        calls = handle.stats()["decode"]
        fed(model, ids(1), (1,), cache)
        assert handle.stats()["decode"] == calls + 6
        assert 0 < handle.cache_bytes(cache).bank <= banked.bank


@pytest.mark.parametrize("offload", ["never", "packed"])
def test_cache_rejects_tensors_that_do_not_fit(offload, build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache(offload=offload)
        fed(model, ids(LENGTH), (LENGTH,), cache)
        layer = cache.layers[3]
        for wrong in (None, 3, torch.zeros(2, 3), torch.zeros(1, 2, 3, 4, 5)):
            with pytest.raises(HeadwiseError, match=r"layer\.keys must be a tensor \(batch, KV"):
                layer.keys = wrong
        for wrong in (torch.zeros(2, 2, 5, 64), torch.zeros(1, 1, 5, 64), torch.zeros(1, 2, 5, 8)):
            broken = copy.deepcopy(cache)
            broken.layers[3].keys = broken.layers[3].values = wrong
            with pytest.raises(HeadwiseError, match="only the third size may differ"):
                fed(model, ids(1), (1,), broken)
        layer.keys = layer.keys[:, :, 1:]
        with pytest.raises(HeadwiseError, match=r"keys has 149 tokens and layer\.values 150"):
            fed(model, ids(1), (1,), cache)
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache(offload=offload)
        fed(model, ids(LENGTH, batch=2), (LENGTH,), cache)
        # torch broadcasts one sequence to two.
        with pytest.raises(HeadwiseError, match=r"only the third size may differ|sequences, KV"):
            fed(model, ids(1), (1,), cache)


def test_reordering_one_banked_layer_raises(build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model, filter_layers=(2,)).apply(model) as handle:
        for place in (3, 5):
            cache = handle.new_cache(offload="packed")
            fed(model, ids(LENGTH, batch=2), (LENGTH,), cache)
            cache.layers[place].reorder_cache(torch.tensor([1, 0]))
            with pytest.raises(HeadwiseError, match="reordered in some layers of this cache only"):
                fed(model, ids(1, batch=2), (1,), cache)
        cache = handle.new_cache(offload="packed")
        fed(model, ids(LENGTH, batch=2), (LENGTH,), cache)
        cache.layers[3].reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(HeadwiseError, match="reordered in some layers of this cache only"):
            cache.layers[5].reorder_cache(torch.tensor([0, 0]))


@pytest.mark.parametrize("layer", [2, 3], ids=["filter layer", "sparse layer"])
@pytest.mark.parametrize("offload", ["never", "packed"])
def test_layers_of_unequal_length_attend_to_all_their_tokens(layer, offload, build, decoding, ids):
    model = build(**LAYERS)

    def use(cache: Any) -> Tensor:
        fed(model, ids(LENGTH), (LENGTH,), cache)
        cache.layers[layer].crop(-50)
        return fed(model, ids(2, seed=1), (1,), cache)

    expected = use(DynamicCache(config=model.config))
    loaded = decoding(model, filter_layers=(2,), dense_layers=(0, 1, 4, 5))
    with loaded.apply(model) as handle:
        actual = use(handle.new_cache(offload=offload))
        assert handle.stats()["dense"]["decode"] == 2
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_resetting_one_banked_layer_keeps_the_others(build, decoding, ids):
    model = build(**LAYERS)

    def use(cache: Any) -> Tensor:
        fed(model, ids(LENGTH), (LENGTH, 1), cache)
        held = cache.layers[3].keys.clone(), cache.layers[3].values.clone()
        cache.layers[3].reset()
        assert cache.layers[3].get_seq_length() == 0
        cache.layers[3].update(*held)
        return continued(model, cache, ids(74, seed=1))

    outs = on_both(model, decoding(model, filter_layers=(2,)), "packed", use)
    torch.testing.assert_close(*outs, **CLOSE)


DROPPING = [*POLICIES.values(), artifacts.Streaming(sinks=0, window=64, positions="original")]


@pytest.mark.parametrize("policy", DROPPING, ids=lambda policy: policy.kind)
def test_policy_layer_rejects_access_to_keys_and_values(policy, build, keeping, ids):
    model = build()
    with keeping(model, policy).apply(model) as handle:
        cache = handle.new_cache()
        layer = cache.layers[0]
        assert layer.keys is None and layer.values is None
        with pytest.raises(HeadwiseError, match="drops tokens by a policy, and has no layer"):
            layer.keys = torch.zeros(1, 2, 5, 64)
        fed(model, ids(LENGTH), (LENGTH,), cache)
        expected = fed(model, ids(1), (1,), copy.deepcopy(cache))
        for edit in (
            lambda: setattr(layer, "keys", torch.zeros(1, 2, 5, 64)),
            lambda: setattr(layer, "values", None),
            lambda: layer.keys.zero_(),
            lambda: list(cache),
            lambda: layer.offload(),
        ):
            with pytest.raises(HeadwiseError, match="drops tokens by a policy, and has no layer"):
                edit()
        assert torch.equal(fed(model, ids(1), (1,), cache), expected)
        assert memory_report(cache).layers[0].seen == LENGTH + 1
        cache.reset()
        assert layer.keys is None


def test_policy_layer_selects_sequences_like_dynamic_cache(build, keeping, ids):
    model = build()
    with keeping(model, artifacts.Full()).apply(model) as handle:
        outs = []
        for cache in (DynamicCache(config=model.config), handle.new_cache()):
            fed(model, ids(LENGTH, batch=2), (LENGTH,), cache)
            select_by_mask_and_from_the_end(cache)
            outs.append(continued(model, cache, ids(74, batch=2, seed=1)))
    torch.testing.assert_close(outs[1], outs[0], **CLOSE)


def test_sliding_layers_of_a_decode_section_are_edited_like_dynamic_cache(build, decoding, ids):
    model = build("Gemma3")
    loaded = decoding(model, filter_layers=(1,), dense_layers=())

    def use(cache: Any) -> Tensor:
        fed(model, ids(LENGTH), (LENGTH,), cache)
        edit_in_place(cache)
        return continued(model, cache, ids(74, seed=1))

    torch.testing.assert_close(*on_both(model, loaded, "packed", use), **CLOSE)
