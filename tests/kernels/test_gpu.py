"""On a GPU: the compiled kernel against the reference, and no call that waits for it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import copies, registry
from kernels.attention import AttentionCall, attend, sparse_attention, triton
from kernels.attention.triton_launch import architecture, select_config, serves
from kernels.gradient import GradientCall, attention_gradients
from kernels.index import PAD, TILE
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.patterns.last_queries import estimate
from kernels.ragged import Ragged
from tests.conformance import attention_cases, builder_cases, interpreted
from tests.conformance.attention_cases import LAYER, TOLERANCES, Case, packed, padded, run, square
from tests.conformance.builder_cases import Estimate
from tests.sampling import core

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)

PADDED = partial(padded, 2000, 30, 1025, 64, queries=1500)
PACKED = partial(packed, (1000, 2000), (1, 900), (64, 64), (700, 700), (1, 1))
LARGE = {
    **{f"length {n}, {kind}": square(n, index=kind, heads=5) for n in (1000,
    4097) for kind in ("layer", "listless")},
    "70 of 4097": Case(q_len=70, k_len=4097, heads=5),
    "1025 of 4097, listless": Case(q_len=1025, k_len=4097, heads=4, kv_heads=2, index="listless"),
    "batch 3": square(700, batch=3, heads=6, kv_heads=2),
    "32 heads on 8, D 128": square(1000, heads=32, kv_heads=8, head_dim=128, v_dim=128),
    **{
        f"D {d}, {kind}": square(500, head_dim=d, v_dim=d, heads=4, kv_heads=2, index=kind)
        for d in (80, 96, 128, 192, 256)
        for kind in ("layer", "listless")
    },
    "thirty diagonals": square(4000, heads=4, index="random:30,0,700"),
    "all three sorts": square(2000, heads=4, index="random:5,5,400"),
    **{f"pages of {size}": square(1000, page=size, heads=5) for size in (16, 64, 256)},
    **{f"pages of {size}, listless": square(1000, page=size, heads=4,
    index="listless") for size in (16, 64, 256)},
    **{
        f"tail {tail}, {q} of 3000, {kind}": Case(
            q_len=q, k_len=3000, heads=5, dense_tail=tail, index=kind
        )
        for tail in (10, 65, 3000)
        for q in (3000, 700)
        for kind in ("layer", "listless")
    },
    **{
        f"window {window}, {kind}": square(2500, heads=5, window=window, index=kind)
        for window in (1, 65, 66, 512, 1000)
        for kind in ("layer", "listless")
    },
    **{
        f"{name}, {kind}{pages}": case(heads=4, kv_heads=2, head_dim=128, v_dim=128, index=kind,
        page=page)
        for kind in ("layer", "listless")
        for page, pages in ((None, ""), (16, ", pages of 16"), (64, ", pages of 64"))
        for name, case in (("padded", PADDED), ("packed", PACKED))
    },
    **{
        f"{name}, window, tail, soft-cap, {sorts}": case(
            heads=4, kv_heads=2, index=f"random:{sorts}", window=512, dense_tail=64,
            softcap=30.0,
            page=16, has_out=True,
        )
        for sorts in ("6,0,300", "6,4,300")
        for name, case in (("padded", PADDED), ("packed", PACKED))
    },
}  # fmt: skip
CASES = {**{f"small: {name}": case for name, case in attention_cases.SMALL.items()}, **LARGE}
RUNS = list(itertools.product(CASES, (torch.float32, torch.float16, torch.bfloat16)))
# One of each sort that the kernel tells apart, and the head dims that are timed: a build for each.
CORE = [
    (name, torch.bfloat16)
    for name in (
        *(f"small: {name.split(': ')[-1]}" for name in interpreted.KEPT["attention"]),
        *(f"D {dim}, {kind}" for dim in (128, 256) for kind in ("layer", "listless")),
        *(
            f"{name}, {kind}, pages of 64"
            for name, kind in (("padded", "layer"), ("packed", "listless"))
        ),
        "32 heads on 8, D 128",
    )
]


@pytest.fixture(autouse=True)
def exact_reference():
    """The oracle must not round to tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("name", "dtype"), core(RUNS, *CORE), ids=str)
def test_attention_kernel_matches_reference(name, dtype):
    case = replace(CASES[name], dtype=dtype)
    if not serves(
        architecture(DEVICE), dim=max(case.head_dim, case.v_dim), itemsize=dtype.itemsize
    ):
        pytest.skip("heads as wide as these do not fit the memory of this GPU")
    if case.cache == torch.float8_e4m3fn and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("this GPU does not read float8_e4m3fn")
    if case.config is not None:
        precision = select_config(
            architecture(DEVICE), dim=64, itemsize=dtype.itemsize, has_tiles=True
        ).precision
        # Steps of 128 keys of 128 numbers in float32 ask for 272 KiB of shared memory, an H100 has
        # 227.
        keys = (
            min(case.config.keys, 32)
            if dtype == torch.float32 and case.head_dim > 64
            else case.config.keys
        )
        case = replace(case, config=replace(case.config, precision=precision, keys=keys))
    out, lse = run(case, DEVICE)
    assert out <= TOLERANCES["out", dtype][0], f"out is off by {out}"
    assert lse <= TOLERANCES["lse", dtype][0], f"lse is off by {lse}"


@pytest.mark.core
def test_auto_selects_triton_and_is_bitwise_reproducible():
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
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (9, 3, 64), (4, 1, 256)])
def test_gradients_match_reference_and_are_bitwise_reproducible(heads, kv_heads, dim):
    """Torch's FlashAttention, which the backward pass of a search uses."""
    torch.manual_seed(0)
    q, grad_out = torch.randn(2, 1, heads, 1000, dim, device=DEVICE).bfloat16()
    k, v = torch.randn(2, 1, kv_heads, 1000, dim, device=DEVICE).bfloat16()
    out, lse = attend(AttentionCall(q, k, v, dense_index(1, heads, 1000, 1000, DEVICE)))
    assert registry.fast("gradient", GradientCall(q, k, v, out, lse, grad_out)) == ("flash", None)
    found, again = (attention_gradients(q, k, v, out, lse, grad_out) for _ in range(2))
    exact = (x.float() for x in (q, k, v, out, lse, grad_out))
    right = attention_gradients(*exact, backend="reference")
    for one, other, expected in zip(found, again, right, strict=True):
        assert torch.equal(one, other) and one.dtype == torch.bfloat16
        assert float((one.float() - expected).norm() / expected.norm()) <= 1e-2


ESTIMATES = {
    "128K tokens": Estimate(
        q_len=2000, k_len=131_072, heads=(0, 1, 2, 3), last_q=(64,) * 4, head_dim=128
    ),
    "1000 queries": Estimate(
        q_len=3000,
        k_len=3000,
        heads=(0, 1, 3),
        last_q=(1000, 64, 700),
        kv_heads=4,
        head_dim=128,
        transposed=True,
    ),
    "a window": Estimate(
        q_len=500, k_len=20_000, heads=(0, 1, 2), last_q=(64, 128, 64), window=1000, head_dim=256
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    core(
        [
            (name, dtype)
            for name in (builder_cases.ESTIMATES | ESTIMATES)
            for dtype in (torch.float16, torch.bfloat16)
        ],
        ("estimate of a layer", torch.bfloat16),
        ("128K tokens", torch.bfloat16),
    ),
    ids=str,
)
def test_estimate_matches_torch(name, dtype):
    case = (builder_cases.ESTIMATES | ESTIMATES)[name]
    error = builder_cases.estimate_error(replace(case, dtype=dtype), DEVICE)
    assert error <= 10 * builder_cases.ERROR


BUILDERS = [
    *builder_cases.CHOICES,
    *builder_cases.MEANS,
    *builder_cases.PAGED,
    *builder_cases.LAYERS,
    *builder_cases.TABLES,
]


@pytest.mark.parametrize(
    "name",
    core(
        BUILDERS,
        "choice of 130",
        "choice of 70000",
        "means, 5 missing, D 80, batch 2",
        "pages: 64 of 450, pages of 128",
        "layer: 130 of 300, batch 1, window None, unlike",
        "tables, 2 query tiles, window 300",
    ),
)
def test_builders_match_torch(name):
    limit = builder_cases.ERROR if name in builder_cases.MEANS else 0
    assert builder_cases.error(name, DEVICE) <= limit


def test_estimate_is_bitwise_reproducible_and_stores_no_attention():
    torch.manual_seed(0)
    q = torch.randn(1, 32, 200, 128, dtype=torch.bfloat16, device=DEVICE)
    k = torch.randn(1, 8, 100_000, 128, dtype=torch.bfloat16, device=DEVICE)
    how = (q, k, range(32), [64] * 32)
    first = estimate(*how, scale=0.1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = estimate(*how, scale=0.1)
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
def test_calls_do_not_synchronize_with_the_gpu(ragged, window):
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


def test_dense_index_at_long_length_equals_causal_attention():
    torch.manual_seed(0)
    length = 32_768
    q = torch.randn(1, 2, length, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.randn(1, 1, length, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    out, _ = triton.run(AttentionCall(q, k, v, dense_index(1, 2, length, length, DEVICE)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert float((out - expected).abs().max()) <= 2e-2


@pytest.fixture
def vast_cache():
    """Keys (1, 32, 2^20, 128): the last rows lie where a 32-bit offset has wrapped."""
    if torch.cuda.mem_get_info(DEVICE)[0] < 20 * 2**30:
        pytest.skip("less than 20 GiB of free GPU memory")
    torch.manual_seed(0)
    cache = torch.empty(1, 2**20, 32, 128, dtype=torch.bfloat16, device=DEVICE).normal_()
    return cache.transpose(1, 2)


def test_offsets_beyond_two_billion_elements_are_correct(vast_cache):
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
