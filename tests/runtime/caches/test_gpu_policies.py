"""Policies on a GPU: what they give on the CPU, and memory that stays where it is."""

from __future__ import annotations

import copy

import pytest
import torch

from artifacts import H2O, Full, SnapKV, Streaming
from runtime import memory_report
from tests.runtime.caches.feeding import fed

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
CLOSE = {"atol": 2e-3, "rtol": 1e-2}
POLICIES = {
    "full": Full(),
    "streaming": Streaming(sinks=4, window=40),
    "h2o": H2O(heavy=20, recent=20),
    "snapkv": SnapKV(budget=48, window=16, pool=3),
}


@pytest.mark.parametrize("sizes", [(1,), (70, 1), (64, 33, 1)])
@pytest.mark.parametrize("name", [*POLICIES, "rolling"])
def test_a_gpu_gives_what_the_cpu_does(name, sizes, build, keeping, ids):
    model, tokens = build("Gemma3" if name == "rolling" else "Llama"), ids(140, batch=2)
    headwise = keeping(model, POLICIES.get(name, Full()))
    found = []
    for device in ("cpu", DEVICE):
        placed = copy.deepcopy(model).to(device)
        with headwise.apply(placed) as handle:
            found.append(fed(placed, tokens.to(device), sizes, handle.new_cache()).cpu())
    torch.testing.assert_close(*found, **CLOSE)


def test_heads_apart_hold_what_the_allocator_gave_out(build, keeping, ids):
    model, tokens = build(num_key_value_heads=4).to(DEVICE), ids(3000).to(DEVICE)
    rows = [("full", "streaming", "h2o", "snapkv")] * 2
    with keeping(model, POLICIES, rows=rows).apply(model) as handle:
        fed(model, tokens, (512,), handle.new_cache())
        before = torch.cuda.memory_allocated()
        cache = handle.new_cache()
        fed(model, tokens, (512,), cache)
        grown = torch.cuda.memory_allocated() - before
    assert grown == pytest.approx(memory_report(cache).device, rel=0.05)
