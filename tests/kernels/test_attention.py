"""One conformance suite: every backend and CPU engine, every case, against the fp32 reference.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.attention import cpu, reference, sparse_attention
from kernels.checks import EIGHT_BITS
from kernels.index import SparseIndex
from kernels.joining import cat_sequences
from kernels.patterns import LayerPlan, Pattern
from kernels.ragged import Ragged
from tests.kernels.triton_inputs import paged


@dataclass(frozen=True, kw_only=True)
class Case:
    q_len: int
    k_len: int
    batch: int = 1
    heads: int = 7
    kv_heads: int = 1
    head_dim: int = 64
    v_dim: int = 64
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    # Nats by which logits rise from key to key: what was added up is rescaled again and again.
    rise: float = 0.0
    layout: str = "contiguous"
    window: int | None = None
    # Queries that see every key, head by head, round and round.
    tail: tuple[int, ...] = ()
    # (q_len, k_len) of each sequence, and how they lie.
    lengths: tuple[tuple[int, int], ...] = ()
    packed: bool = False
    page: int | None = None
    # The dtype of keys and values, if it is not that of the queries.
    cache: torch.dtype | None = None

    @property
    def ragged(self) -> Ragged | None:
        if not self.lengths:
            return None
        q_lens, k_lens = zip(*self.lengths, strict=True)
        if self.packed:
            return Ragged.packed(
                [0, *itertools.accumulate(q_lens)], [0, *itertools.accumulate(k_lens)]
            )
        if self.page is not None:
            return Ragged(
                rows=(0,) * len(q_lens),
                q_starts=tuple(itertools.accumulate(q_lens, initial=0))[:-1],
                q_lens=q_lens,
                k_starts=(0,) * len(k_lens),
                k_lens=k_lens,
            )
        return Ragged(
            rows=tuple(range(len(q_lens))),
            q_starts=tuple(self.q_len - n for n in q_lens),
            q_lens=q_lens,
            k_starts=tuple(self.k_len - n for n in k_lens),
            k_lens=k_lens,
        )


def square(length: int, **more: object) -> Case:
    return Case(q_len=length, k_len=length, **more)  # type: ignore[arg-type]


CASES = {
    **{f"length {n}": square(n) for n in (1, 63, 64, 65, 1000)},
    "length 4097": square(4097, heads=2),
    **{
        f"{h} heads on {g}": square(257, heads=h, kv_heads=g)
        for h, g in ((7, 7), (9, 3), (16, 2), (5, 1))
    },
    "batch 2": square(200, batch=2, heads=6, kv_heads=2),
    **{
        f"{q} of {k}": Case(q_len=q, k_len=k)
        for q, k in ((1, 65), (1, 1000), (37, 1000), (64, 192), (129, 301))
    },
    "70 of 4097": Case(q_len=70, k_len=4097, heads=5),
    # Few enough blocks to be cut into parts of the keys.
    **{
        f"tail, {q} of 4100": Case(q_len=q, k_len=4100, heads=2, batch=b, tail=(4100, 20))
        for q, b in ((17, 1), (65, 2), (200, 1))
    },
    "batch 3, 65 of 130": Case(q_len=65, k_len=130, batch=3, heads=4, kv_heads=2),
    **{f"D {d}": square(200, head_dim=d, v_dim=d) for d in (80, 96, 128, 256, 512)},
    **{
        f"D {d}, E {e}": square(200, head_dim=d, v_dim=e)
        for d, e in ((192, 128), (64, 256), (33, 17), (1, 1))
    },
    "D 320, E 512": square(200, heads=2, head_dim=320, v_dim=512),
    "sinks": square(300, heads=9, kv_heads=3, sinks=True),
    "sinks, 100 of 5000, tail, window, soft-cap": Case(
        q_len=100, k_len=5000, heads=2, sinks=True, tail=(0, 70), window=3000, softcap=20.0
    ),
    "own scale": square(300, scale=0.5),
    "rising": square(900, heads=4, kv_heads=2, rise=0.012),
    "rising, 70 of 4100, soft-cap": Case(
        q_len=70, k_len=4100, heads=4, kv_heads=2, rise=0.002, softcap=50.0, tail=(4100,)
    ),
    "soft-cap 2": square(300, scale=0.5, softcap=2.0),
    "soft-cap 50, q of k": Case(q_len=100, k_len=500, softcap=50.0),
    "transposed": square(300, batch=2, heads=6, kv_heads=2, layout="transposed"),
    "strided": square(300, batch=2, heads=6, kv_heads=2, layout="strided"),
    **{f"window {n}": square(500, window=n) for n in (1, 40, 64, 65, 200, 1000)},
    "window 100, 130 of 700": Case(q_len=130, k_len=700, window=100, softcap=20.0),
    "tail by head": square(300, tail=(0, 10, 70, 300, 1)),
    "tail, 100 of 500, window 150": Case(q_len=100, k_len=500, tail=(5, 0, 90), window=150),
    "left padded": square(
        300, batch=3, heads=6, kv_heads=2, lengths=((300, 300), (1, 1), (129, 129))
    ),
    "left padded, q of k": Case(
        q_len=100,
        k_len=400,
        batch=3,
        heads=6,
        kv_heads=2,
        lengths=((100, 400), (30, 30), (100, 129)),
    ),
    "packed": Case(
        q_len=310,
        k_len=310,
        heads=6,
        kv_heads=2,
        packed=True,
        lengths=((1, 1), (180, 180), (129, 129)),
    ),
    "packed, q of k, tail, window": Case(
        q_len=210,
        k_len=710,
        heads=6,
        kv_heads=2,
        packed=True,
        lengths=((100, 500), (1, 80), (109, 130)),
        window=140,
        tail=(0, 70),
        softcap=30.0,
    ),
    **{
        f"pages of {size}": Case(q_len=130, k_len=333, batch=2, heads=6, kv_heads=2, page=size)
        for size in (1, 16, 64)
    },
    "packed queries, pages": Case(
        q_len=210,
        k_len=500,
        heads=6,
        kv_heads=2,
        page=16,
        lengths=((100, 500), (1, 80), (109, 109)),
        tail=(70,),
    ),
    "expanded": Case(q_len=100, k_len=300, batch=2, heads=6, kv_heads=2, layout="expanded"),
    **{
        f"{str(cache)[6:]}, {name}": replace(case, cache=cache)
        for cache in EIGHT_BITS
        for name, case in {
            "D 80, E 33": square(300, heads=5, head_dim=80, v_dim=33),
            "strided": square(200, batch=2, heads=6, kv_heads=2, layout="strided"),
            "pages of 16, 130 of 333": Case(
                q_len=130, k_len=333, batch=2, heads=6, kv_heads=2, page=16, softcap=30.0
            ),
            "packed, sinks, tail, window": Case(
                q_len=210,
                k_len=710,
                heads=6,
                kv_heads=2,
                packed=True,
                lengths=((100, 500), (1, 80), (109, 130)),
                window=140,
                tail=(0, 70),
                sinks=True,
            ),
        }.items()
    },
}
ENGINES = {
    torch.float32: ["float"],
    torch.float16: ["float"],
    torch.bfloat16: ["amx", "brgemm", "dot", "float"],
}
SERVERS = [(dtype, f"cpu {engine}") for dtype, engines in ENGINES.items() for engine in engines]
# The reference is the oracle: what is left to see is that it takes these dtypes and layouts.
REFERENCE_CASES = (
    "left padded",
    "packed, q of k, tail, window",
    "packed queries, pages",
    "pages of 16",
    "length 65",
    "9 heads on 3",
    "37 of 1000",
    "D 192, E 128",
    "soft-cap 2",
    "sinks",
    "strided",
    "float8_e5m2, pages of 16, 130 of 333",
)
RUNS = [(d, s, name) for d, s in SERVERS for name in CASES] + [
    (d, "reference", name) for d in ENGINES for name in REFERENCE_CASES
]

# Largest absolute error and relative L2 error of standard normal inputs. float16 is computed in
# float32.
TOLERANCES = {
    ("out", torch.float32): (1e-5, 2e-6),
    ("out", torch.float16): (2e-3, 4e-4),
    ("out", torch.bfloat16): (2e-2, 5e-3),
    ("lse", torch.float32): (1e-5, 2e-6),
    ("lse", torch.float16): (1e-5, 2e-6),
    ("lse", torch.bfloat16): (2e-4, 2e-5),
}


@contextmanager
def threads(number: int) -> Iterator[None]:
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def check(actual: Tensor, expected: Tensor, op: str, dtype: torch.dtype) -> None:
    """Fails with both errors and the worst place; NaN anywhere fails."""
    # Rows of no sequence: -inf in both.
    nothing = (actual == float("-inf")) & (expected == float("-inf"))
    error = (
        (actual.double() - expected.double())
        .abs()
        .masked_fill(nothing, 0)
        .nan_to_num(nan=float("inf"))
    )
    expected = expected.masked_fill(nothing, 0)
    worst, relative = (
        float(error.max()),
        float(error.norm() / expected.double().norm().clamp_min(1e-30)),
    )
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    most, most_relative = TOLERANCES[op, dtype]
    assert worst <= most and relative <= most_relative, (
        f"{op} in {dtype}: largest error {worst:.3g} (allowed {most}) at {place}, "
        f"{float(actual[place])} for {float(expected[place])}; "
        f"relative error {relative:.3g} (allowed {most_relative})"
    )


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    batch, heads, length, dim = shape
    if layout == "transposed":
        return torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2)
    if layout == "strided":
        return torch.randn(batch, heads + 1, 2 * length, 3 * dim).to(dtype)[:, 1:, ::2, ::3]
    if layout == "expanded":
        return torch.randn(1, heads, length, dim).to(dtype).expand(batch, -1, -1, -1)
    return torch.randn(shape).to(dtype)


class Problem(NamedTuple):
    """A call, and the oracle's out and lse; with pages k and v are caches."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: SparseIndex
    table: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor


@functools.cache
def problem(name: str, dtype: torch.dtype, layer: tuple[Pattern, ...]) -> Problem:
    case = CASES[name]
    torch.manual_seed(list(CASES).index(name))
    ragged, table = case.ragged, None
    key_rows = len(case.lengths) if ragged is not None and case.page is not None else case.batch
    q = laid_out((case.batch, case.heads, case.q_len, case.head_dim), case.layout, dtype)
    k = laid_out((key_rows, case.kv_heads, case.k_len, case.head_dim), case.layout, dtype)
    v = laid_out((key_rows, case.kv_heads, case.k_len, case.v_dim), case.layout, dtype)
    if case.rise:
        q[..., 0] = case.head_dim**0.5
        k[..., 0] = case.rise * torch.arange(case.k_len)
    plan = LayerPlan(list(itertools.islice(itertools.cycle(layer), case.heads)), case.kv_heads)
    if ragged is None or case.page is None:
        index = plan.build(q, k, scale=case.scale, window=case.window, ragged=ragged)
    else:
        parts = [
            plan.build(
                q[:, :, at : at + q_len],
                k[s : s + 1, :, :k_len],
                scale=case.scale,
                window=case.window,
            )
            for s, (at, q_len, k_len) in enumerate(
                zip(ragged.q_starts, ragged.q_lens, ragged.k_lens, strict=True)
            )
        ]
        index = cat_sequences(parts, ragged)
    if case.tail:
        index = replace(
            index, dense_tail=tuple(itertools.islice(itertools.cycle(case.tail), case.heads))
        )
    index.validate()
    if case.page is not None:
        (k, table), (v, _) = paged(k, case.page), paged(v, case.page)
    if case.cache is not None:
        k, v = k.to(case.cache), v.to(case.cache)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    sinks = torch.randn(case.heads) * 3 if case.sinks else None
    out, lse = reference.sparse_attention(
        q.float(),
        k.float(),
        v.float(),
        index,
        scale=scale,
        softcap=case.softcap,
        block_table=table,
        sinks=sinks,
    )
    return Problem(q, k, v, index, table, sinks, out, lse)


@pytest.mark.parametrize(
    ("dtype", "server", "name"), RUNS, ids=[f"{str(d)[6:]} {s}, {n}" for d, s, n in RUNS]
)
def test_backend_agrees_with_the_reference(
    dtype: torch.dtype, server: str, name: str, layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    case = CASES[name]
    backend, _, engine = server.partition(" ")
    if engine and engine not in cpu.engines(dtype):
        pytest.skip(f"this processor or build has no engine {engine!r}")
    q, k, v, index, table, sinks, expected, expected_lse = problem(
        name, dtype, layer_of_unlike_heads
    )
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    if backend == "cpu":
        with threads(2):
            out, lse = cpu.sparse_attention(
                q,
                k,
                v,
                index,
                scale=scale,
                softcap=case.softcap,
                block_table=table,
                sinks=sinks,
                engine=engine,
            )
    else:
        how = {"scale": case.scale, "softcap": case.softcap, "block_table": table, "sinks": sinks}
        out, lse = sparse_attention(q, k, v, index, **how, return_lse=True, backend=backend)  # type: ignore[call-overload]
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.shape == expected.shape and lse.shape == expected_lse.shape
    assert out.transpose(1, 2).is_contiguous()
    check(out, expected, "out", dtype)
    check(lse, expected_lse, "lse", dtype)


@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if "4097" not in n and case.page is None]
)
def test_reference_is_softmax_over_the_mask(
    name: str, layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    case = CASES[name]
    q, k, v, index, _, sinks, out, lse = problem(name, torch.float32, layer_of_unlike_heads)
    group = case.heads // case.kv_heads
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    lengths = case.lengths or ((case.q_len, case.k_len),) * case.batch
    expected = torch.zeros(out.shape, dtype=torch.float64)
    expected_lse = torch.full(lse.shape, float("-inf"), dtype=torch.float64)
    ends = [0, 0]
    for s, (q_len, k_len) in enumerate(lengths):
        if case.packed:
            b, ends = 0, [ends[0] + q_len, ends[1] + k_len]
        else:
            b, ends = s, [case.q_len, case.k_len]
        asked, seen = slice(ends[0] - q_len, ends[0]), slice(ends[1] - k_len, ends[1])
        logits = q[b, :, asked].double() @ keys[b, :, seen].transpose(1, 2)
        logits *= case.head_dim**-0.5 if case.scale is None else case.scale
        if case.softcap is not None:
            logits = case.softcap * (logits / case.softcap).tanh()
        distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
        mask = index.sequence(s).to_mask()[0]
        assert not mask[:, (distance < 0) | (distance >= (case.window or k_len))].any()
        logits = logits.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            logits = torch.cat([sinks.double()[:, None, None].expand(-1, q_len, 1), logits], dim=-1)
        expected[b, :, asked] = logits.softmax(-1)[..., -k_len:] @ values[b, :, seen]
        expected_lse[b, :, asked] = logits.logsumexp(-1)
    check(out, expected, "out", torch.float32)
    check(lse, expected_lse, "lse", torch.float32)


def test_default_scale_backend_and_result(layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    q, k, v, index, _, _, expected, expected_lse = problem(
        "9 heads on 3", torch.float32, layer_of_unlike_heads
    )
    check(sparse_attention(q, k, v, index), expected, "out", torch.float32)
    out, lse = sparse_attention(q, k, v, index, return_lse=True)
    check(out, expected, "out", torch.float32)
    check(lse, expected_lse, "lse", torch.float32)


@pytest.mark.parametrize(("dtype", "server"), SERVERS)
@pytest.mark.parametrize("name", ["length 1000", "tail, 65 of 4100"])
def test_same_bits_again_and_for_any_number_of_threads(
    dtype: torch.dtype, server: str, name: str, layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    engine = server.partition(" ")[2]
    if engine not in cpu.engines(dtype):
        pytest.skip(f"this processor or build has no engine {engine!r}")
    q, k, v, index, *_ = problem(name, dtype, layer_of_unlike_heads)
    results = []
    for number in (1, 2, 2, 3):
        with threads(number):
            results.append(
                cpu.sparse_attention(q, k, v, index, scale=0.125, softcap=None, engine=engine)
            )
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
