"""Conformance of kernel backends: every backend, CPU engine and device against the reference.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import registry
from kernels.attention import AttentionCall, attend, cpu
from kernels.call import Operands
from kernels.decode import Decoded, decode_attention
from kernels.decode import cpu as decode_cpu
from kernels.index import TILE, SparseIndex, num_tiles
from kernels.reference import Decode
from tests.conformance import attention_cases, builder_cases, decode_cases, extremes, interpreted
from tests.conformance.attention_cases import check, served
from tests.kernels.conftest import one_thread, poisoned_memory
from tests.processes import interpret
from tests.sampling import on_gpu

__all__ = ["one_thread", "poisoned_memory"]

HOST = torch.device("cpu")
GPU = torch.device("cuda", 0)
# Served cases, by the dtype of the queries.
ENGINES = {
    torch.float32: ["float"],
    torch.float16: ["float"],
    torch.bfloat16: ["amx", "dot", "float"],
}
DECODE_ENGINES = {**ENGINES, torch.bfloat16: ["dot", "float"]}


def runs(
    cases: dict[str, Any], engines: dict[torch.dtype, list[str]]
) -> list[tuple[torch.dtype, str, str]]:
    """Number format, server and case: every case in float32 and bfloat16, some in float16."""
    result = []
    for dtype, names in engines.items():
        for name in cases:
            some = name in interpreted.HALF
            for engine in names:
                if dtype is torch.float32 or engine != "float" or some:
                    result.append((dtype, f"cpu {engine}", name))
            if some:
                result.append((dtype, "reference", name))
    return result


def by_triton(cases: dict[str, Any], *kept: str) -> list[Any]:
    """Every case in every number format by Triton on a GPU; `make gpu` runs those kept."""
    every = itertools.product(ENGINES, ["triton"], cases)
    return on_gpu(every, *((torch.bfloat16, "triton", name) for name in kept))


def skip_on_this_gpu(op: str, call: tuple[Tensor, ...]) -> None:
    """Skip heads that are too wide for the GPU, and keys of 8 bits that it does not read."""
    if reason := registry.implementation(op, "triton").supports(Operands(*call)):
        pytest.skip(reason)


def skip_without(server: str, engines: list[str]) -> str:
    """The engine of a server's name; the test is skipped where it is not built."""
    engine = server.partition(" ")[2]
    if engine and engine not in engines:
        pytest.skip(f"this processor or build has no engine {engine!r}")
    return engine


# The longest of all goes first: one process interprets what `make test` has of Triton's kernels.
@pytest.mark.slow
def test_triton_interpreted_equals_the_reference():
    result = interpret(interpreted.__name__, "kept")
    assert result["extremes"] == []
    for op in interpreted.KEPT:
        assert faults(result[op]) == {}, op
    # The check of memory, under which every case runs, finds each misuse.
    report = result["memory"]
    assert report["right"] == ""
    assert "reads_beyond: program 2 reads outside of the call's tensors" in report["reads_beyond"]
    assert (
        "writes_before: program 0 writes outside of the call's tensors" in report["writes_before"]
    )
    assert "writes_twice: programs 0 and 1 write the same element" in report["writes_twice"]
    assert "reads what program" in report["reads_another_s"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("op", interpreted.KEPT)
def test_triton_interpreted_equals_the_reference_in_every_case(op):
    rest = [name for name in interpreted.ALL[op] if name not in interpreted.KEPT[op]]
    assert faults(interpret(interpreted.__name__, op, *rest)[op]) == {}


def faults(errors: dict[str, float]) -> dict[str, float]:
    """Cases with an error above the tolerance."""
    return {name: error for name, error in errors.items() if not error <= 1}


@contextmanager
def threads(number: int) -> Iterator[None]:
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def attention_op(
    server: str, case: attention_cases.Case
) -> Callable[[AttentionCall], tuple[Tensor, Tensor]]:
    """Attention of a backend's engine, "cpu dot", or of a backend."""
    if server == "triton":
        return attention_cases.by_triton(case, GPU)
    engine = skip_without(server, cpu.engines(case.dtype))
    if engine:
        return functools.partial(cpu.run, engine=engine)
    return functools.partial(attend, backend=server)


# Servers of a case follow each other.
problem = functools.lru_cache(maxsize=32)(attention_cases.problem)
ATTENTION = attention_cases.CASES | attention_cases.ON_GPU


@pytest.mark.parametrize(
    ("dtype", "server", "name"),
    [
        *runs(attention_cases.CASES, ENGINES),
        *by_triton(
            ATTENTION,
            *(n for n in interpreted.KEPT["attention"] if n in attention_cases.SMALL),
            *(f"D {dim}, {kind}" for dim in (128, 256) for kind in ("layer", "listless")),
            "32 heads on 8, D 128",
            "padded, pages of 64, layer",
            "packed, pages of 16, listless",
        ),
    ],
    ids=lambda part: str(part).removeprefix("torch."),
)
def test_attention_backend_equals_the_reference(dtype, server, name):
    case = replace(ATTENTION[name], dtype=dtype)
    op = attention_op(server, case)
    inputs = problem(case, GPU if server == "triton" else HOST)
    if server == "triton":
        skip_on_this_gpu("attention", inputs[:3])
    with threads(1 + (name in attention_cases.LONG)):
        out, lse = served(case, inputs, op)
    check(out, inputs.out, "out", dtype)
    check(lse, inputs.lse, "lse", dtype)


@pytest.mark.parametrize(
    "name",
    [n for n, case in attention_cases.SMALL.items() if case.skip is not None or case.page is None],
)
def test_reference_attention_equals_masked_softmax(name):
    case = replace(attention_cases.CASES[name], page=None)
    inputs = problem(case, HOST)
    group = case.heads // case.kv_heads
    out = torch.zeros(inputs.out.shape, dtype=torch.float64)
    lse = torch.full(inputs.lse.shape, float("-inf"), dtype=torch.float64)
    places = [(b, 0, case.q_len, 0, case.k_len) for b in range(case.batch)]
    if case.ragged is not None:
        places = list(case.ragged.sequences)
    for s, (b, q_start, q_len, k_start, k_len) in enumerate(places):
        queries = slice(q_start, q_start + q_len)
        rows = slice(k_start, k_start + k_len)
        keys, values = (
            x[b, :, rows].double().repeat_interleave(group, dim=0) for x in (inputs.k, inputs.v)
        )
        logits = inputs.q[b, :, queries].double() @ keys.transpose(1, 2)
        logits *= case.scale or case.head_dim**-0.5
        if case.softcap is not None:
            logits = case.softcap * (logits / case.softcap).tanh()
        index = inputs.index.sequence(s)
        distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
        mask = index.to_mask()[0]
        assert not mask[:, (distance < 0) | (distance >= (case.window or k_len))].any()
        if case.skip is not None:
            mask, skipped = without_skipped(index, mask, logits)
            assert skipped == inputs.skipped[s].tolist()
        logits = logits.masked_fill(~mask, float("-inf"))
        if case.sinks:
            sinks = inputs.rest["logits"].sinks.double()[:, None, None].expand(-1, q_len, 1)
            logits = torch.cat([sinks, logits], dim=-1)
        out[b, :, queries] = logits.softmax(-1)[..., -k_len:] @ values
        lse[b, :, queries] = logits.logsumexp(-1)
    check(inputs.out, out, "out", torch.float32)
    check(inputs.lse, lse, "lse", torch.float32)


def without_skipped(index: SparseIndex, mask: Tensor, logits: Tensor) -> tuple[Tensor, list[int]]:
    """The mask (H, Q, K) without the tiles that are skipped, and how many each head skips.

    By the definition in kernels.index, independent of the kernels. logits: (H, Q, K)."""
    assert index.skip is not None
    left = mask.clone()
    counts = [0] * index.num_heads
    offset = index.k_len - index.q_len
    key = torch.arange(index.k_len)
    for head, bound in enumerate(index.skip[0].tolist()):
        columns = torch.isin(key, index.columns[0, head])
        for at in range(index.first_row, min(num_tiles(index.k_len), index.dense_from())):
            queries = slice(max(at * TILE - offset, 0), (at + 1) * TILE - offset)
            listed = index.padded_tiles()[0, head, at - index.first_row].tolist()
            tiles = {*(at - d for d in index.diagonals[0, head].tolist()), *listed}
            tiles = {tile for tile in tiles if max(0, at - index.window_tiles) <= tile <= at}
            whole = torch.isin(key // TILE, torch.tensor(sorted(tiles)))
            anchors = torch.isin(key // TILE, torch.tensor([0, at])) & whole | columns & ~whole
            seen = logits[head, queries].masked_fill(~mask[head, queries], float("-inf"))
            anchor = seen[:, anchors].amax(-1)
            for tile in tiles - {0, at}:
                keys = slice(tile * TILE, (tile + 1) * TILE)
                if float((seen[:, keys].amax(-1) - anchor).max()) < bound:
                    left[head, queries, keys] = False
                    counts[head] += 1
    return left, counts


def decode_op(server: str, case: decode_cases.Case) -> Callable[..., Decoded]:
    """Decode of a backend's engine, "cpu dot", or of a backend."""
    of_prompts = case.q_len > decode_cases.MAX_QUERIES
    if server == "triton":
        return decode_cases.by_triton(case)
    engines = (cpu if of_prompts else decode_cpu).engines(case.dtype)
    engine = skip_without(server, engines)
    if engine:
        return decode_cases.serve(decode_cpu, engine=engine)
    return functools.partial(decode_attention, backend=server)


STEPS = decode_cases.SMALL | decode_cases.LARGE
PROMPTS = decode_cases.PROMPTS | decode_cases.LONG_PROMPTS
DECODE = decode_cases.CASES | decode_cases.ON_GPU


@pytest.mark.parametrize(
    ("dtype", "server", "name"),
    [
        *runs(STEPS, DECODE_ENGINES),
        *runs(PROMPTS, ENGINES),
        *by_triton(
            DECODE,
            *(n for n in interpreted.KEPT["decode"] if n in decode_cases.SMALL),
            *("D 128", "D 256", "16 queries", "pages of 64, window", "sinks"),
            *("4097 keys, 32 heads on 8", "4097 keys in pages", "200 of 201", "prompt, D 256"),
        ),
    ],
    ids=lambda part: str(part).removeprefix("torch."),
)
def test_decode_backend_equals_the_reference(dtype, server, name):
    case = replace(DECODE[name], dtype=dtype)
    op = decode_op(server, case)
    device = HOST
    if server == "triton":
        device = GPU
        skip_on_this_gpu("decode", decode_cases.problem(case, GPU)[0])
    for kind in case.kinds:
        with threads(1 + (case.k_len > 1000)):
            errors = decode_cases.run(case, device, op, kind)
        assert decode_cases.close(errors, dtype), (kind, errors)


@pytest.mark.parametrize("name", decode_cases.SMALL | decode_cases.PROMPTS)
def test_reference_decode_equals_softmax_over_visible_keys(name):
    """The definition once more, in float64, over a mask, with neither lists nor pages."""
    case = decode_cases.CASES[name]
    (q, k, v), rest, seen = decode_cases.problem(replace(case, page=None), HOST)
    (qp, kp, vp), paged, _ = decode_cases.problem(case, HOST)
    groups = case.heads // case.kv_heads
    visible = seen.any(2).repeat_interleave(groups, 1)[..., None]
    keys, values = (x.double().repeat_interleave(groups, 1).where(visible, 0) for x in (k, v))
    logits = q.double() @ keys.transpose(2, 3) * (case.scale or case.head_dim**-0.5)
    if case.softcap is not None:
        logits = case.softcap * (logits / case.softcap).tanh()
    mask = seen.repeat_interleave(groups, 1)
    logits = logits.masked_fill(~mask, float("-inf"))
    lse = logits.logsumexp(-1)
    if case.sinks:
        lse = torch.logaddexp(lse, rest["logits"].sinks.double()[:, None])
    shares = (logits - lse[..., None]).exp().nan_to_num()
    mass = shares.view(case.batch, case.kv_heads, -1, case.k_len)
    for scores, wanted in (("sum", mass.sum(2)), ("max", mass.amax(2))):
        if scores not in case.kinds:
            continue
        result = decode_cases.serve(Decode)(qp, kp, vp, **paged, scores=scores)
        expected = Decoded(shares @ values, lse, _listed(wanted, result, rest))
        assert max(decode_cases.errors(result, expected, groups * case.q_len)) <= 1e-5


def _listed(scores: Tensor, result: Decoded, rest: dict[str, Any]) -> Tensor:
    """Scores of all keys (B, G, K) at the chosen ones, or with zeros up to the last page's end."""
    assert result.scores is not None
    if (tokens := rest["tokens"]) is None:
        return torch.nn.functional.pad(scores, (0, result.scores.shape[-1] - scores.shape[-1]))
    lists = (tokens if tokens.dim() == 3 else tokens[:, None]).expand(-1, scores.shape[1], -1)
    return torch.nn.functional.pad(scores, (0, 1)).gather(
        2, lists.clamp(max=scores.shape[-1]).long()
    )


SERVERS = [(dtype, f"cpu {engine}") for dtype, engines in ENGINES.items() for engine in engines]


@pytest.mark.parametrize(("dtype", "server"), SERVERS)
@pytest.mark.parametrize("name", ["length 1000", "tail, 65 of 4100", "padded, q of k", "1 of 65"])
def test_attention_for_any_number_of_threads_gives_the_same_bits(dtype, server, name):
    case = replace(attention_cases.CASES[name], dtype=dtype)
    op = attention_op(server, case)
    inputs = problem(case, HOST)
    results = []
    for number in (1, 2, 2, 3):
        with threads(number):
            results.append(served(case, inputs, op))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", DECODE_ENGINES, ids=str)
@pytest.mark.parametrize(
    "name", ["2048 of 4097 keys", "ends far apart", "starts and ends", "600 of 1201"]
)
def test_decode_for_any_number_of_threads_gives_the_same_bits(dtype, name):
    case = replace(decode_cases.CASES[name], dtype=dtype)
    qkv, rest, _ = decode_cases.problem(case, HOST)
    results = []
    for number, scores in ((1, "sum"), (2, "sum"), (3, "sum"), (2, "none")):
        kind = scores if len(case.kinds) == 2 else "sum"
        with threads(number):
            results.append(decode_attention(*qkv, **rest, scores=kind, backend="cpu"))
    for result in results[1:]:
        assert torch.equal(result.out, results[0].out) and torch.equal(result.lse, results[0].lse)
        assert result.scores is None or torch.equal(result.scores, results[0].scores)


STORED = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float8_e5m2),
]


@pytest.mark.parametrize(
    ("op", "window"),
    [("attention", None), ("attention", 70), ("decode", None), ("decode", 70), ("scores", None)],
)
@pytest.mark.parametrize(("dtype", "stored"), STORED)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention_with_nan_affects_its_head_alone(op, dtype, stored, window, backend):
    q_len = 150
    keys = (200, 250, 329)
    if op == "decode":
        q_len = 6
        keys = (325, 327, 329)
    inputs = extremes.call(
        op, backend, q_len=q_len, k_len=330, dtype=dtype, stored=stored, window=window
    )
    places = [
        *(("value", key, bad) for key in keys for bad in (extremes.NAN, -extremes.INF)),
        *(("key", key, extremes.NAN) for key in keys),
        ("query", q_len // 2, extremes.NAN),
    ]
    assert list(extremes.reached(inputs, *places)) == []


@pytest.mark.parametrize("factor", [1e5, 3e9, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", extremes.OPS)
def test_extreme_logits_equal_the_reference(op, dtype, factor):
    assert extremes.wrong_where_huge(op, "cpu", 200, factor, dtype) == ""


@pytest.mark.parametrize(
    "name",
    on_gpu(
        builder_cases.CASES,
        "estimate of a layer",
        "estimate of 128K tokens",
        "choice of 130",
        "choice of 70000",
        "means, 5 missing, D 80, batch 2",
        "pages: 64 of 450, pages of 128",
        "layer: 130 of 300, batch 1, window None, unlike",
        "tables, 2 query tiles, window 300",
    ),
)
def test_builder_on_a_gpu_equals_the_reference(name):
    assert builder_cases.error(name, GPU) <= 1
