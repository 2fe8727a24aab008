"""What only a GPU can show of offloading: streams that wait for each other, pinned memory, the
allocator's bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from runtime.caches.growing import BankedLayer
from runtime.omnikv.lane import Lane
from tests.runtime.omnikv import CLOSE, LAYERS, steps

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
# About 10 ms: far more than a step of these models takes.
LONG = 20_000_000


class SlowLane(Lane):
    """Every copy is late on its stream, so that whatever does not wait for it goes wrong."""

    def send(self, target, rows) -> None:
        with torch.cuda.stream(self._outward):
            torch.cuda._sleep(LONG)
        super().send(target, rows)

    def deliver(self, staged, target, places) -> None:
        torch.cuda._sleep(LONG)
        super().deliver(staged, target, places)


@pytest.fixture
def model(build):
    return build(**LAYERS).to(DEVICE)


def left_padded(ids, lengths):
    width = max(lengths)
    real = torch.stack([torch.arange(width) >= width - n for n in lengths]).long().to(DEVICE)
    tokens = ids(width, batch=len(lengths)).to(DEVICE) * real
    return {
        "prompt": tokens,
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize("lane", [Lane, SlowLane])
@pytest.mark.parametrize("budget", [24, 0.125])
@pytest.mark.parametrize("lengths", [(150,), (150, 90, 120)])
def test_offloaded_is_what_stays_on_the_device(
    lengths, budget, lane, model, decoding, ids, monkeypatch
) -> None:
    monkeypatch.setattr("runtime.omnikv.bank.Lane", lane)
    given, forced = left_padded(ids, lengths), ids(8, batch=len(lengths), seed=9).to(DEVICE)
    with decoding(model, budget=budget).apply(model) as handle:
        expected = steps(model, forced=forced, cache=handle.new_cache(offload="never"), **given)
        found = steps(model, forced=forced, cache=handle.new_cache(offload="packed"), **given)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("inference", [False, True])
def test_turns_crops_and_copies_wait_for_what_is_on_its_way(
    inference, model, decoding, ids, monkeypatch
) -> None:
    monkeypatch.setattr("runtime.omnikv.bank.Lane", SlowLane)
    text, found = ids(260).to(DEVICE), []
    with decoding(model).apply(model) as handle, torch.inference_mode(inference):
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            model(text[:, :70], past_key_values=cache, use_cache=True)
            parts = [steps(model, text[:, 70:150], text[:, 150:154], cache)]
            cache.crop(-3)
            parts.append(steps(model, text[:, 160:230], text[:, 230:233], cache))
            twin = copy.deepcopy(cache)
            parts += [
                steps(model, text[:, at : at + 1], text[:, 240:243], c)
                for at, c in ((250, cache), (255, twin))
            ]
            cache.reorder_cache(torch.zeros(1, dtype=torch.long, device=DEVICE))
            parts.append(steps(model, text[:, 251:252], text[:, 243:246], cache))
            found.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_auto_is_packed_in_pinned_memory(model, decoding, ids) -> None:
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache()
        steps(model, ids(150).to(DEVICE), ids(4, seed=9).to(DEVICE), cache)
    banked = [layer for layer in cache.layers if isinstance(layer, BankedLayer)]
    assert len(banked) == 2
    assert all(page.is_pinned() for layer in banked for page in layer.bank.pages)


@pytest.mark.parametrize("offload", ["never", "packed"])
def test_bytes_are_those_of_the_allocator(offload, build, decoding) -> None:
    model = build(**LAYERS).to(DEVICE, torch.bfloat16)
    with decoding(model, budget=2048).apply(model, check_weights=False) as handle:
        cache = handle.new_cache(offload=offload)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for layer in range(LAYERS["num_hidden_layers"]):
            states = torch.randn(1, 2, 60_000, 64, device=DEVICE, dtype=torch.bfloat16)
            cache.update(states, states, layer)
            del states
        token = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
        for at in range(3):
            position = torch.full_like(token, 60_000 + at)
            model(token, position_ids=position, past_key_values=cache, use_cache=True)
        torch.cuda.synchronize()
        held, given = handle.cache_bytes(cache), torch.cuda.memory_allocated() - before
    assert given == pytest.approx(held.device, rel=0.05, abs=2**16)
    assert (held.bank == 0) == (offload == "never")


def test_short_of_memory_the_bank_serves_what_the_device_cannot_hold(build, decoding) -> None:
    """Where all keys and values do not fit under the limit, packed decodes and transformers' own
    cache does not."""
    model = build(num_hidden_layers=12).to(DEVICE, torch.bfloat16)
    length, width = 200_000, 2 * 2 * 64 * 2
    room = 6 * length * width
    total = torch.cuda.get_device_properties(DEVICE).total_memory

    def fill(cache) -> None:
        for layer in range(12):
            states = torch.zeros(1, 2, length, 64, device=DEVICE, dtype=torch.bfloat16)
            cache.update(states, states, layer)
        token = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
        model(token, position_ids=token + length, past_key_values=cache, use_cache=True)

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        with decoding(model, filter_layers=(1,), dense_layers=(0,), budget=1024).apply(
            model, check_weights=False
        ) as handle:
            fill(handle.new_cache())
        with pytest.raises(torch.OutOfMemoryError):
            fill(DynamicCache(config=model.config))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
