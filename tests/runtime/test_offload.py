"""Keys and values in a context bank: fetches, placement, and moves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.index import PAD
from runtime.omnikv.bank import Bank, OffloadedTensor
from tests.runtime.omnikv import CLOSE, DECODE, LAYERS, steps

pytestmark = pytest.mark.usefixtures("late")
PACKED = {"offload": "packed"}


def states(length: int) -> list[tuple[Tensor, Tensor]]:
    """Return random keys (1, 2, length, 8) and values (1, 2, length, 6) of two layers."""
    return [(torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 6)) for _ in range(2)]


def attended(
    bank: Bank, past: int, new: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor] | None]:
    """Append to each layer and return the keys and values it attends to."""
    actual = []
    for layer, (k, v) in enumerate(new):
        if not past:
            assert bank.enter(layer, k, v)
        held = bank.attended(bank.append(layer, past, k, v))
        actual.append(None if held is None else held[:2])
    return actual


def same_rows(actual: Tensor, expected: Tensor) -> bool:
    """Return True if keys or values (1, G, n, D) have the same rows in any order and the same
    last row."""
    rows = [sorted(x[0].transpose(0, 1).flatten(1).tolist()) for x in (actual, expected)]
    return rows[0] == rows[1] and torch.equal(actual[:, :, -1], expected[:, :, -1])


def test_bank_fetches_only_newly_selected_rows():
    bank, layers = Bank(2, 0), states(60)
    attended(bank, 0, [(k[:, :, :50], v[:, :, :50]) for k, v in layers])
    selections = [
        [1, 5, 6, 40, 50],
        [1, 6, 7, 50, 51],
        [1, 6, 7, 50, 52],
        [0, 1, 2, 3, 53],
        [0, 1, 53, 54, PAD],
    ]
    for past, tokens in enumerate(selections, 50):
        bank.fetch(torch.tensor([tokens], dtype=torch.int32), past)
        now = slice(past, past + 1)
        wanted = [token for token in tokens if token <= past]
        actual = attended(bank, past, [(k[:, :, now], v[:, :, now]) for k, v in layers])
        for held, all_of_it in zip(actual, layers, strict=True):
            assert all(
                same_rows(rows, x[:, :, wanted]) for rows, x in zip(held, all_of_it, strict=True)
            )
    assert bank.copy_engine.fetched == [2 * n for n in (4, 2, 3, 1)]


def test_bank_refetches_token_that_replaces_cropped_one():
    bank, layers, other = Bank(2, 0), states(50), states(3)
    attended(bank, 0, layers)
    bank.fetch(torch.tensor([[1, 48, 50]], dtype=torch.int32), 50)
    bank.crop(47)
    attended(bank, 47, other)
    early = copy.deepcopy(bank)
    assert attended(bank, 50, states(1)) == [None, None], "the choice was for what there was before"
    bank.crop(50)
    bank.fetch(torch.tensor([[1, 50, PAD]], dtype=torch.int32), 50)
    twin = copy.deepcopy(bank)
    assert twin.copy_engine is not bank.copy_engine, "two copies may be at work in two threads"
    assert attended(twin, 50, states(1)) == [None, None]
    for each in (early, bank, twin):
        each.crop(50)
        each.fetch(torch.tensor([[1, 48, 50]], dtype=torch.int32), 50)
        for held, old, new in zip(attended(each, 50, states(1)), layers, other, strict=True):
            for actual, before, after in zip(held, old, new, strict=True):
                assert torch.equal(actual[:, :, :2].sum(2), before[:, :, 1] + after[:, :, 1])


def test_offload_short_context_stays_on_device(build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model, budget=40).apply(model) as handle:
        cache = handle.new_cache(**PACKED)
        steps(model, ids(30), ids(10, seed=1), cache)
        assert handle.cache_bytes(cache).bank == 0
        steps(model, ids(1), ids(1, seed=2), cache)
        assert handle.cache_bytes(cache).bank > 0


def test_cache_bytes_equal_allocated_bytes(build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model, selector="uniform").apply(model) as handle:
        held = {}
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            steps(model, ids(600), ids(4, seed=1), cache)
            held[offload] = handle.cache_bytes(cache)
        scores, token = 7 * 604 * 4, 2 * 2 * 64 * 4
    assert held["never"].bank == 0
    # Two layers are dense, two filter, and two use banks with the budget's tokens on the device.
    assert held["packed"].device == 4 * (600 + 256) * token + 2 * scores + 2 * DECODE.budget * token
    assert 2 * 604 * token <= held["packed"].bank <= 1.2 * 2 * 604 * token


def test_offloaded_cache_after_undo_is_read_in_full(build, decoding, ids):
    model, prompt, forced = build(**LAYERS), ids(150), ids(5, seed=9)
    expected = steps(model, prompt, forced)
    loaded = decoding(model)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        actual = steps(model, prompt, forced, loaded.new_cache(model, **PACKED))
        torch.testing.assert_close(actual, expected, **CLOSE)


def test_offload_layers_unlike_first_of_group_stay_on_device(build, decoding):
    model = build(**LAYERS)
    cache = decoding(model, filter_layers=(2,)).new_cache(model, **PACKED)
    for layer, dim in ((3, 64), (4, 32), (5, 64)):
        cache.update(torch.randn(1, 2, 50, dim), torch.randn(1, 2, 50, dim), layer)
    more = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32)
    assert not isinstance(cache.update(*more, 4)[0], OffloadedTensor)
    assert [not layer.tensors() for layer in cache.layers[3:]] == [True, False, True]


def test_offload_bank_per_device_has_slot_per_layer(build, decoding):
    """Slots were counted over all devices, so the second device's bank had none for its layers."""
    model = build(**LAYERS)
    loaded = decoding(model, filter_layers=(2,))
    model.model.layers[4:].to("meta")
    cache = loaded.new_cache(model, **PACKED)
    banked = cache.layers[3:]
    assert banked[0].bank is not banked[1].bank and banked[1].bank is banked[2].bank
    assert [(layer.bank.layers, layer.place) for layer in banked] == [(1, 0), (2, 0), (2, 1)]


def test_new_cache_rejects_unknown_offload(build, decoding):
    model = build(**LAYERS)
    with pytest.raises(HeadwiseError, match="one of auto, never, packed, got 'cpu'"):
        decoding(model).new_cache(model, offload="cpu")
