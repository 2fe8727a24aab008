"""GPU checks: stream synchronization, pinned memory, allocator bytes, and agreement with the
CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from runtime import memory_report
from runtime.caches.growing import BankedLayer
from runtime.omnikv.copy_engine import CopyEngine
from tests.runtime.batches import fed
from tests.runtime.conftest import POLICIES
from tests.runtime.omnikv import CLOSE, LAYERS, steps

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
# About 10 ms, much longer than a step of these models.
LONG = 20_000_000


class SlowCopyEngine(CopyEngine):
    """Copy engine with delayed copies: a read without a wait returns wrong values."""

    def write(self, target, rows) -> None:
        with torch.cuda.stream(self._outward):
            torch.cuda._sleep(LONG)
        super().send(target, rows)

    def deliver(self, staged, target, places) -> None:
        torch.cuda._sleep(LONG)
        super().deliver(staged, target, places)


@pytest.fixture
def model(build):
    return build(**LAYERS).to(DEVICE)


@pytest.mark.parametrize("engine", [CopyEngine, SlowCopyEngine])
@pytest.mark.parametrize("budget", [24, 0.125])
@pytest.mark.parametrize("lengths", [(150,), (150, 90, 120)])
def test_offload_keeps_logits(lengths, budget, engine, model, decoding, ids, monkeypatch):
    monkeypatch.setattr("runtime.omnikv.bank.CopyEngine", engine)
    width = max(lengths)
    real = torch.stack([torch.arange(width) >= width - n for n in lengths]).long().to(DEVICE)
    tokens = ids(width + 8, batch=len(lengths)).to(DEVICE)
    prompt, forced = tokens.split((width, 8), dim=1)
    with decoding(model, budget=budget).apply(model) as handle:
        expected = steps(model, prompt, forced, handle.new_cache(offload="never"), real)
        actual = steps(model, prompt, forced, handle.new_cache(offload="packed"), real)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("inference", [False, True])
def test_offload_turns_crops_and_copies_wait_for_late_rows(
    inference, model, decoding, ids, monkeypatch
):
    monkeypatch.setattr("runtime.omnikv.bank.CopyEngine", SlowCopyEngine)
    text, actual = ids(260).to(DEVICE), []
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
            actual.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(actual[1], actual[0], **CLOSE)


def test_offload_auto_uses_pinned_packed_memory(model, decoding, ids):
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache()
        steps(model, ids(150).to(DEVICE), ids(4, seed=9).to(DEVICE), cache)
    banked = [layer for layer in cache.layers if isinstance(layer, BankedLayer)]
    assert len(banked) == 2
    assert all(page.is_pinned() for layer in banked for page in layer.bank.pages)


@pytest.mark.parametrize("offload", ["never", "packed"])
def test_cache_bytes_match_cuda_allocator(offload, build, decoding):
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
        held, allocated = handle.cache_bytes(cache), torch.cuda.memory_allocated() - before
    assert allocated == pytest.approx(held.device, rel=0.05, abs=2**16)
    assert (held.bank == 0) == (offload == "never")


@pytest.mark.parametrize("sizes", [(1,), (70, 1), (64, 33, 1)])
@pytest.mark.parametrize("name", [*POLICIES, "rolling"])
def test_policies_on_gpu_match_cpu(name, sizes, build, keeping, ids):
    model, tokens = build("Gemma3" if name == "rolling" else "Llama"), ids(140, batch=2)
    headwise = keeping(model, POLICIES.get(name, POLICIES["full"]))
    actual = []
    for device in ("cpu", DEVICE):
        placed = copy.deepcopy(model).to(device)
        with headwise.apply(placed) as handle:
            actual.append(fed(placed, tokens.to(device), sizes, handle.new_cache()).cpu())
    torch.testing.assert_close(*actual, atol=2e-3, rtol=1e-2)


def test_cache_bytes_per_head_policies_match_cuda_allocator(build, keeping, ids):
    model, tokens = build(num_key_value_heads=4).to(DEVICE), ids(3000).to(DEVICE)
    rows = [("full", "streaming", "h2o", "snapkv")] * 2
    with keeping(model, POLICIES, rows=rows).apply(model) as handle:
        fed(model, tokens, (512,), handle.new_cache())
        before = torch.cuda.memory_allocated()
        cache = handle.new_cache()
        fed(model, tokens, (512,), cache)
        grown = torch.cuda.memory_allocated() - before
    assert grown == pytest.approx(memory_report(cache).device, rel=0.05)
