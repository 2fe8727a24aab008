"""On a GPU: the same bits in every call, no call that waits, and tensors beyond 2^31 elements.

Results of the compiled kernels are compared in tests/conformance. Shapes: B batch, H query heads, G
KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kernels import copies
from kernels.attention import AttentionCall, attend, sparse_attention, triton
from kernels.decode import decode_attention
from kernels.index import PAD, TILE
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.patterns.last_queries import EstimateCall
from kernels.ragged import Ragged
from tests.conformance import decode_cases
from tests.conformance.attention_cases import LAYER, TOLERANCES
from tests.conformance.decode_cases import LARGE, SMALL, Case, close, errors, oracle, problem

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.core
def test_attention_by_auto_is_triton_s_and_bitwise_reproducible():
    torch.manual_seed(0)
    q = torch.randn(1, 8, 3000, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.randn(1, 2, 3000, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    plan = LayerPlan(
        [make("vertical_slash", vertical=300, slash=500), make("block_sparse", blocks=8)] * 4, 2
    )
    index = plan.build(q, k)
    first, lse = attend(AttentionCall(q, k, v, index))
    for _ in range(3):
        again = sparse_attention(q, k, v, index, backend="triton")
        assert torch.equal(first, again)
    exact = AttentionCall(q.float(), k.float(), v.float(), index)
    expected, expected_lse = attend(exact, "reference")
    assert float((first.float() - expected).abs().max()) <= TOLERANCES["out", torch.bfloat16][0]
    assert float((lse - expected_lse).abs().max()) <= TOLERANCES["lse", torch.bfloat16][0]


@pytest.mark.core
def test_decode_by_auto_is_triton_s_and_bitwise_reproducible_with_and_without_scores():
    case = replace(LARGE["4097 keys, 32 heads on 8"], dtype=torch.bfloat16)
    qkv, rest, _ = problem(case, DEVICE)
    first = decode_attention(*qkv, **rest, scores="sum")
    assert close(errors(first, oracle(case, DEVICE, "sum"), 4), torch.bfloat16)
    for scores in ("sum", "max", "none"):
        again = decode_attention(*qkv, **rest, scores=scores, backend="triton")
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


def test_long_prompt_scores_are_bitwise_reproducible():
    case = Case(q_len=5000, k_len=6000, heads=8, head_dim=128, v_dim=128, dtype=torch.bfloat16)
    qkv, _, _ = problem(case, DEVICE)
    first, again = (decode_attention(*qkv, scores="sum", backend="triton") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    error = errors(first, oracle(case, DEVICE, "sum"), 5000 * 4)
    assert close(error, torch.bfloat16), error


def test_estimate_is_bitwise_reproducible_and_stores_no_attention():
    torch.manual_seed(0)
    q = torch.randn(1, 32, 200, 128, dtype=torch.bfloat16, device=DEVICE)
    k = torch.randn(1, 8, 100_000, 128, dtype=torch.bfloat16, device=DEVICE)
    how = (q, k, range(32), [64] * 32)
    first = EstimateCall(*how, scale=0.1).run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = EstimateCall(*how, scale=0.1).run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # Both masses, each slash in two parts, and little else: not 64 rows for each head.
    assert torch.cuda.max_memory_allocated() - before < 8 * 32 * 100_000 * 4


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "ragged",
    [
        None,
        Ragged.left_padded([2000], 2000, 2000),
        Ragged.left_padded([1500], 2000, 2000),
        Ragged.packed([0, 900, 1990], [0, 900, 1990]),
    ],
    ids=["plain", "one sequence", "padded", "packed"],
)
@pytest.mark.parametrize("window", [None, 300])
def test_prefill_does_not_synchronize_with_the_gpu(ragged, window):
    """Neither index nor attention waits, on the first call or on later ones with warm caches."""
    q = torch.randn(1, 5, 2000, 64, dtype=torch.bfloat16, device=DEVICE)
    k = q[:, :1]
    plan = LayerPlan(LAYER, 1, dense_tail=70)
    sparse_attention(q, k, k, plan.build(q, k, window=window, ragged=ragged), backend="triton")
    copies._copied.cache_clear()
    plan = LayerPlan(LAYER, 1, dense_tail=70)
    if ragged is not None:
        ragged = replace(ragged)
    with no_waiting():
        for _ in range(2):
            index = plan.build(q, k, window=window, ragged=ragged)
            sparse_attention(q, k, k, index, backend="triton", out=torch.empty_like(q))


@pytest.mark.parametrize("name", ["starts, ends and tokens", "pages of 64, window"])
def test_decode_does_not_synchronize_with_the_gpu(name):
    qkv, rest, _ = problem(SMALL[name], DEVICE)
    decode_attention(*qkv, **rest, scores="max", backend="triton")
    with no_waiting():
        decode_attention(*qkv, **rest, scores="max", backend="triton")


def test_numbers_copied_on_one_stream_are_correct_on_another():
    """The copy is delayed, and the host does not wait for it."""
    values = tuple(range(1000, 1500))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    copies._copied.cache_clear()
    with no_waiting():
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000_000)
            copies.on_device(values, DEVICE)
        with torch.cuda.stream(second):
            read = copies.on_device(values, DEVICE) + 0
    # The stream that reads it here does not wait for the second one implicitly.
    second.synchronize()
    assert read.tolist() == list(values)


def test_numbers_first_copied_in_a_graph_are_correct_at_each_replay():
    values = tuple(range(2000, 2500))
    copies._copied.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = copies.on_device(values, DEVICE) + 0
    # Nothing has been replayed, and others ask already.
    assert copies.on_device(values, DEVICE).tolist() == list(values)
    copies._copied.cache_clear()
    buffers = [torch.zeros(len(values), dtype=torch.int64).pin_memory() for _ in range(8)]
    for _ in range(2):
        read.zero_()
        graph.replay()
        assert read.tolist() == list(values) and not any(other.any() for other in buffers)


@pytest.fixture
def vast_cache():
    """Keys (1, 32, 2^20, 128): the last rows lie where a 32-bit offset has wrapped."""
    if torch.cuda.mem_get_info(DEVICE)[0] < 20 * 2**30:
        pytest.skip("less than 20 GiB of free GPU memory")
    torch.manual_seed(0)
    cache = torch.empty(1, 2**20, 32, 128, dtype=torch.bfloat16, device=DEVICE).normal_()
    return cache.transpose(1, 2)


def test_attention_beyond_two_billion_elements_is_correct(vast_cache):
    heads, length, dim = vast_cache.shape[1:]
    k = v = vast_cache
    q = torch.randn(1, heads, 100, dim, dtype=torch.bfloat16, device=DEVICE)
    index = LayerPlan([make("a_shape", sink=64, window=300)] * heads, heads).build(q, k)
    out, lse = triton.run(AttentionCall(q, k, v, index))
    # The last head's last queries see the first tile and a contiguous run of the last tiles.
    last = slice(heads - 1, heads)
    recent = torch.arange(length - 7 * TILE, length, device=DEVICE)
    key = torch.cat([torch.arange(TILE, device=DEVICE), recent])
    position = torch.arange(length - 100, length, device=DEVICE)[:, None]
    run = int((index.diagonals[0, -1] < PAD).sum())
    seen = (key <= position) & ((key < TILE) | (key // TILE > position // TILE - run))
    values = k[:, last, key].float()
    logits = (q[:, last].float() @ values.transpose(2, 3) * dim**-0.5).masked_fill(
        ~seen, float("-inf")
    )
    errors = (
        (lse[:, last] - logits.logsumexp(-1)).abs(),
        (out[:, last].float() - logits.softmax(-1) @ values).abs(),
    )
    assert float(errors[0].max()) <= TOLERANCES["lse", torch.bfloat16][0]
    assert float(errors[1].max()) <= TOLERANCES["out", torch.bfloat16][0]


def test_decode_beyond_two_billion_elements_is_correct(vast_cache):
    heads, length, dim = vast_cache.shape[1:]
    q = torch.randn(1, heads, 1, dim, dtype=torch.bfloat16, device=DEVICE)
    tokens = torch.arange(length - 300, length, dtype=torch.int32, device=DEVICE)[None]
    some = {"tokens": tokens, "scores": "sum", "backend": "triton"}
    result = decode_attention(q, vast_cache, vast_cache, **some)
    near = vast_cache[:, :, -300:].float()
    expected = decode_attention(q.float(), near, near, scores="sum", backend="reference")
    assert close(errors(result, expected, 1), torch.bfloat16)
    windowed = decode_attention(
        q, vast_cache, vast_cache, logits=Logits(window=300), backend="triton"
    )
    assert (
        float((windowed.out.float() - expected.out).abs().max())
        <= decode_cases.TOLERANCES[torch.bfloat16][0]
    )
