"""Cases of decode attention and of a prompt's scores, for every backend, and their oracle.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.call import MAX_QUERIES
from kernels.decode import DecodeCall, Decoded, decode_attention, triton
from kernels.index import PAD
from kernels.logits import Logits
from kernels.reference import Decode
from tests.conformance.tensors import difference, make_tensor, paged


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call; `tokens` is None, "shared", "heads" (for each KV head) or "ragged" (also in number).

    Keys and values are of dtype `cache`, or of the queries'. `splits` is Triton's alone.
    """

    q_len: int = 1
    k_len: int = 300
    batch: int = 1
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    v_dim: int = 64
    tokens: str | None = None
    chosen: int = 100
    starts: tuple[int, ...] | None = None
    ends: tuple[int, ...] | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    layout: str = "contiguous"
    page: int | None = None
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    splits: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Scores that the op can return: only sums for more queries than a step has."""
        return ("sum", "max") if self.q_len <= MAX_QUERIES else ("sum",)


# Starts and ends of three sequences: full, in the middle, and (for a few queries) shorter than the
# queries.
SPANS = {"batch": 3, "starts": (0, 37, 5), "ends": (300, 211, 8)}
_BASE = {
    **{f"{k} keys": Case(k_len=k) for k in (1, 63, 64, 65)},
    **{f"{q} queries": Case(q_len=q) for q in (5, 16)},
    "16 queries of 3 keys": Case(q_len=16, k_len=3),
    **{
        f"{h} heads on {g}": Case(heads=h, kv_heads=g, q_len=2)
        for h, g in ((3, 3), (16, 2), (5, 1))
    },
    "128 rows of a KV head": Case(heads=8, kv_heads=1, q_len=16),
    **{f"D {d}": Case(head_dim=d, v_dim=d) for d in (80, 96, 128, 256, 512)},
    **{
        f"D {d}, E {e}": Case(head_dim=d, v_dim=e)
        for d, e in ((192, 128), (64, 256), (33, 17), (1, 1))
    },
    "own scale": Case(scale=0.5),
    "sinks": Case(sinks=True, q_len=2),
    "sinks, tokens": Case(q_len=2, sinks=True, tokens="ragged", batch=2),
    "soft-cap 2": Case(scale=0.5, softcap=2.0, q_len=2),
    **{f"{kind} tokens": Case(batch=2, tokens=kind, q_len=2) for kind in ("shared", "ragged")},
    "one token": Case(tokens="heads", chosen=1),
    "starts and ends": Case(q_len=5, **SPANS),
    "starts, ends and tokens": Case(q_len=5, tokens="ragged", **SPANS),
    "window": Case(q_len=5, window=40),
    "window of 1": Case(q_len=2, window=1),
    "window, starts, ends, soft-cap": Case(q_len=5, window=30, softcap=20.0, **SPANS),
    "window and tokens": Case(q_len=5, window=150, tokens="ragged", batch=2),
    "an empty sequence": Case(batch=2, starts=(0, 40), ends=(300, 40)),
    "transposed layout": Case(batch=2, layout="transposed", q_len=2),
    "strided layout": Case(batch=2, layout="strided", q_len=2, tokens="heads"),
    "expanded layout": Case(batch=2, layout="expanded", q_len=2, tokens="shared"),
    "pages of 16": Case(q_len=2, page=16, **SPANS),
    "pages of 64, window": Case(q_len=2, page=64, window=100, **SPANS),
    "pages of 10 and tokens": Case(q_len=2, page=10, tokens="ragged", **SPANS),
    # Parts of the keys are Triton's.
    "3 splits, window, sinks, soft-cap": Case(
        q_len=5, sinks=True, window=30, softcap=20.0, splits=3, **SPANS
    ),
    "3 splits, pages, tokens": Case(q_len=2, page=16, tokens="ragged", splits=3, **SPANS),
    "20 splits": Case(splits=20),
}
# What Triton's interpreter can do as well.
SMALL = _BASE | {
    f"float8 {kind}, {name}": replace(_BASE[name], cache=cache)
    for kind, cache, name in (
        ("e4m3", torch.float8_e4m3fn, "D 33, E 17"),
        ("e4m3", torch.float8_e4m3fn, "pages of 16"),
        ("e5m2", torch.float8_e5m2, "sinks, tokens"),
        ("e5m2", torch.float8_e5m2, "strided layout"),
        ("e5m2", torch.float8_e5m2, "pages of 10 and tokens"),
    )
}
LARGE = {
    "1000 keys": Case(k_len=1000),
    "4097 keys, 5 queries": Case(k_len=4097, q_len=5),
    "4097 keys, 32 heads on 8": Case(k_len=4097, heads=32, kv_heads=8, head_dim=128, v_dim=128),
    "2048 of 4097 keys": Case(k_len=4097, tokens="ragged", chosen=2048, batch=2, q_len=2),
    "ends far apart": Case(
        k_len=4097, batch=3, starts=(0, 1500, 4000), ends=(4097, 2100, 4003), q_len=5
    ),
    "window of 700": Case(k_len=4097, window=700, q_len=16),
    "4097 keys in pages": Case(
        k_len=4097, page=64, batch=2, starts=(0, 70), ends=(4000, 1234), q_len=2
    ),
}
# A prompt with the sums of its probabilities: three query heads a KV head, two tiles of queries,
# as small as tells the cases apart.
_GROUPED = Case(q_len=70, k_len=200)
PROMPTS = {
    "70 of 200": _GROUPED,
    **{
        f"{q} of {k}": Case(q_len=q, k_len=k, heads=2, kv_heads=1, head_dim=32, v_dim=32)
        for q, k in ((17, 300), (33, 33), (200, 201))
    },
    "1 on 1, 17 of 65, D 24, E 40": Case(
        q_len=17, k_len=65, heads=4, kv_heads=4, head_dim=24, v_dim=40
    ),
    "129 of 640, D 128": Case(q_len=129, k_len=640, heads=2, kv_heads=1, head_dim=128),
    **{
        f"prompt, D {d}": Case(q_len=70, k_len=100, heads=2, kv_heads=1, head_dim=d)
        for d in (96, 256, 300)
    },
    "prompt, batch 2, strided, soft-cap": replace(
        _GROUPED, batch=2, layout="strided", softcap=3.0, scale=0.5
    ),
    "prompt, float8": replace(_GROUPED, cache=torch.float8_e4m3fn),
}
LONG_PROMPTS = {
    "600 of 1201": Case(q_len=600, k_len=1201, heads=2, kv_heads=2, batch=2, head_dim=80, v_dim=80)
}
CASES = SMALL | LARGE | PROMPTS | LONG_PROMPTS
ON_GPU = {
    f"20000 keys, D {dim}": Case(k_len=20_000, heads=8, kv_heads=2, head_dim=dim, v_dim=dim)
    for dim in (64, 80, 96, 128, 256)
}

# Largest absolute error of standard normal inputs: out, log-sum-exp, and scores for each query row
# of a KV head.
TOLERANCES = {
    torch.float32: (1e-5, 1e-5, 2e-6),
    torch.float16: (2e-3, 1e-5, 2e-6),
    torch.bfloat16: (2e-2, 2e-4, 1e-4),
}


def close(errors: tuple[float, float, float], dtype: torch.dtype) -> bool:
    """True if no error is larger than allowed."""
    return all(error <= most for error, most in zip(errors, TOLERANCES[dtype], strict=True))


@functools.cache
def problem(
    case: Case, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], Tensor]:
    """q, k and v, the other arguments, and the rows that each query sees (B, G, Q, K), unpaged.

    Rows that no query of their KV head sees hold NaN: reading one shows.
    """
    torch.manual_seed(case.k_len + case.q_len)
    shapes = (
        (case.batch, case.heads, case.q_len, case.head_dim),
        (case.batch, case.kv_heads, case.k_len, case.head_dim),
        (case.batch, case.kv_heads, case.k_len, case.v_dim),
    )
    q, k, v = (make_tensor(shape, case.layout, case.dtype) for shape in shapes)
    places = {name: _int32(getattr(case, name), device) for name in ("starts", "ends")}
    tokens = _tokens(case)
    seen = visible(case, tokens)
    if case.layout != "expanded":
        for x in (k, v):
            x.masked_fill_(~seen.any(2)[..., None], float("nan"))
    sinks = (torch.randn(case.heads) * 2).to(device) if case.sinks else None
    rest = {
        "tokens": None if tokens is None else tokens.to(device),
        "logits": Logits(case.scale, case.softcap, sinks, case.window),
        **places,
    }
    q, k, v = (x.to(device) for x in (q, k, v))
    if case.page is not None:
        # The order is the same for both: one table serves K and V.
        (k, rest["block_table"]), (v, _) = paged(k, case.page), paged(v, case.page)
    if case.cache is not None:
        k, v = k.to(case.cache), v.to(case.cache)
    return (q, k, v), rest, seen.to(device)


def visible(case: Case, tokens: Tensor | None) -> Tensor:
    """(B, G, Q, K): the definition, written down once more."""
    shape = (case.batch, case.kv_heads, case.q_len, case.k_len)
    seen = torch.zeros(shape, dtype=torch.bool)
    for b in range(case.batch):
        start = case.starts[b] if case.starts else 0
        end = case.ends[b] if case.ends else case.k_len
        for i in range(case.q_len):
            at = end - case.q_len + i
            first = start if case.window is None else max(start, at - case.window + 1)
            seen[b, :, i, max(first, 0) : max(at + 1, 0)] = True
    if tokens is not None:
        selected = torch.zeros(case.batch, case.kv_heads, case.k_len + 1, dtype=torch.bool)
        lists = tokens if tokens.dim() == 3 else tokens[:, None].expand(-1, case.kv_heads, -1)
        selected.scatter_(-1, lists.clamp(max=case.k_len).long(), True)
        seen &= selected[:, :, None, :-1]
    return seen


def _int32(values: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


def _tokens(case: Case) -> Tensor | None:
    if case.tokens is None:
        return None
    lists = 1 if case.tokens == "shared" else case.kv_heads
    tokens = torch.full((case.batch, lists, case.chosen), PAD, dtype=torch.int32)
    for b in range(case.batch):
        for g in range(lists):
            count = case.chosen
            if case.tokens == "ragged":
                count = max(1, case.chosen >> (2 * b + 3 * g))
            tokens[b, g, :count] = torch.randperm(case.k_len)[:count].sort().values
    return tokens[:, 0] if case.tokens == "shared" else tokens


def errors(result: Decoded, expected: Decoded, rows: int) -> tuple[float, float, float]:
    """Largest errors of out, log-sum-exp and scores, the last for each of `rows`; NaN counts."""
    assert result.scores is not None and expected.scores is not None
    pairs = (
        (result.out, expected.out),
        (result.lse, expected.lse),
        (result.scores, expected.scores),
    )
    out, lse, scores = (float(difference(*pair).max()) for pair in pairs)
    return out, lse, scores / rows


def serve(backend: Any, **form: Any) -> Callable[..., Decoded]:
    """A backend's module as the op, with separate arguments."""

    def op(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Decoded:
        return backend.run(DecodeCall(q, k, v, **rest), **form)

    return op


def by_triton(case: Case) -> Callable[..., Decoded]:
    """The op by its name, or with as many parts of the keys as the case asks for."""
    if case.splits is None:
        return functools.partial(decode_attention, backend="triton")
    return serve(triton, splits=case.splits)


@functools.cache
def oracle(case: Case, device: torch.device, scores: str) -> Decoded:
    """Results of the reference for the rounded inputs, in fp32."""
    qkv, rest, _ = problem(case, device)
    return serve(Decode)(*(x.float() for x in qkv), **rest, scores=scores)


def run(
    case: Case, device: torch.device, op: Callable[..., Decoded], scores: str
) -> tuple[float, float, float]:
    """Errors of an op against the fp32 reference."""
    qkv, rest, _ = problem(case, device)
    result = op(*qkv, **rest, scores=scores)
    assert result.out.dtype == case.dtype and result.lse.dtype == torch.float32
    assert result.out.transpose(1, 2).is_contiguous()
    return errors(result, oracle(case, device, scores), case.q_len * case.heads // case.kv_heads)
