"""What only a GPU can show of low_memory: the allocator's peaks, and an 8B shape at 512K and 1M tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

import artifacts
from profiling.gpu.model import LLAMA_8B
from profiling.memory_plan import plan, shape_of
from runtime import Headwise
from tests.runtime.omnikv import DECODE

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
CARD = 139 * 10**9


def peak(model, handle, length: int, offload: str = "never") -> int:
    """Bytes that the allocator gave out at most in a prefill, beside what it held before; the cache's included."""
    ids = torch.randint(3, model.config.vocab_size, (1, length), device=DEVICE)
    cache = handle.new_cache(offload=offload)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    assert bool(logits.isfinite().all())
    return torch.cuda.max_memory_allocated() - before


def test_peaks_are_those_planned_for(build, artifact_for) -> None:
    length = 100_000
    model = build(intermediate_size=1024, num_hidden_layers=3, max_position_embeddings=length).to(
        DEVICE, torch.bfloat16
    )
    shape, headwise = shape_of(model.config), Headwise(artifact_for(model, dense_below=8192))
    peaks = []
    for low_memory in (False, True):
        with headwise.apply(model, strict=True, check_weights=False, low_memory=low_memory) as handle:
            peak(model, handle, 10_000)
            expected = plan(shape, length, low_memory=low_memory, device="cuda")
            peaks.append(peak(model, handle, length))
            # Beside tensors of the prompt's length: entries of the index, and scratch memory of its builders.
            assert peaks[-1] < 1.1 * (expected.cache + expected.passing) + 2**30
    assert peaks[1] < peaks[0]


def test_the_same_logits_as_without(build, artifact_for, ids) -> None:
    model = build(num_hidden_layers=4).to(DEVICE)
    headwise, prompt, found = Headwise(artifact_for(model)), ids(900, batch=2).to(DEVICE), []
    for low_memory in (False, True):
        with headwise.apply(model, strict=True, check_weights=False, low_memory=low_memory) as handle:
            cache = handle.new_cache() if low_memory else DynamicCache(config=model.config)
            found.append(model(prompt, past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "offload"), [(2**19, "never"), (2**20, "packed")])
def test_an_8b_shape_on_one_card(length, offload, artifact_for) -> None:
    """Weights are random: what is measured does not depend on them."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    if total < CARD:
        pytest.skip(f"a GPU of {total / 1e9:.0f} GB; needs {CARD / 1e9:.0f} GB")
    config = transformers.LlamaConfig(**LLAMA_8B)
    banked, shape = 26 if offload == "packed" else 0, shape_of(config)
    expected = plan(shape, length, low_memory=True, device="cuda", banked=banked)
    free = _free()
    if expected.bank > 0.9 * free:
        pytest.skip(f"{free / 2**30:.0f} GiB of CPU memory are free; the bank takes {expected.bank / 2**30:.0f} GiB")
    torch.cuda.empty_cache()
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rows = [[name for name in ("vs_70_70", "a_64_64", "vs_70_70", "bs_2") for _ in range(8)]] * 32
    artifact = artifact_for(model, dense_below=8192, rows=rows)
    if offload == "packed":
        section = DECODE.model_copy(update={"filter_layers": (4, 16), "dense_layers": (0, 1, 2, 3), "budget": 4096})
        artifact = artifact.model_copy(update={"decode": artifacts.Decode(omnikv=section)})
    with Headwise(artifact).apply(model, strict=True, check_weights=False, low_memory=True) as handle:
        peak(model, handle, 16_384, offload)
        found = peak(model, handle, length, offload) + torch.cuda.memory_allocated()
    print(f"{length} tokens, {offload}: {found / 2**30:.1f} GiB, planned {expected.device / 2**30:.1f}")
    assert found < CARD and found < 1.05 * expected.device + 2**31


def _free() -> int:
    """Bytes of CPU memory that are free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
