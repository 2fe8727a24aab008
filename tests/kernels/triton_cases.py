"""Cases of the Triton kernel, small enough for its interpreter; run as a script it interprets and prints the errors.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, N key tiles.

    TRITON_INTERPRET=1 python tests/kernels/triton_cases.py    one JSON object: case -> largest errors of out and lse
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.attention import triton as backend
from kernels.attention.triton_launch import Launch
from kernels.index import PAD, SparseIndex, ascending, empty_entries, num_rows, num_tiles, with_dense_tail
from kernels.patterns import LayerPlan, make

LAYER = (
    make("vertical_slash", vertical=80, slash=90),
    make("block_sparse", blocks=2),
    make("a_shape", sink=70, window=100),
    make("vertical_slash", vertical=120, slash=64, last_q=16),
    make("dense"),
)
# Without block-sparse heads a program may serve two query tiles.
LISTLESS = tuple(pattern for pattern in LAYER if pattern.kind != "block_sparse")
# Largest absolute error of standard normal inputs: one rounding of the output, and of the probabilities in 16 bits.
OUT_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LSE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 2e-4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`index` is "layer" (unlike heads), "listless" or "random:D,T,C" (so many of each sort in every head)."""

    q_len: int
    k_len: int
    batch: int = 1
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    v_dim: int = 64
    scale: float | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    index: str = "layer"
    dense_tail: int = 0
    page: int | None = None
    layout: str = "contiguous"
    launch: Launch | None = None


def square(length: int, **more: object) -> Case:
    return Case(q_len=length, k_len=length, **more)  # type: ignore[arg-type]


def _launch(rows: int, keys: int) -> Launch:
    return Launch(rows=rows, keys=keys, warps=4, stages=2)


SMALL = {
    **{f"length {n}, {kind}": square(n, index=kind) for n in (1, 63, 64, 65, 200) for kind in ("layer", "listless")},
    "5 heads, 129 tokens": square(129, heads=5),
    **{f"{h} heads on {g}": square(130, heads=h, kv_heads=g) for h, g in ((2, 2), (6, 2), (8, 1))},
    "batch 2": square(130, batch=2, heads=2, kv_heads=2, index="listless"),
    **{
        f"{q} of {k}, {kind}": Case(q_len=q, k_len=k, index=kind)
        for q, k in ((1, 65), (37, 200), (65, 300), (129, 257))
        for kind in ("layer", "listless")
    },
    **{f"D {d}": square(130, head_dim=d, v_dim=d, heads=2, index="listless") for d in (80, 96, 128, 256)},
    "D 33, E 17": square(130, head_dim=33, v_dim=17),
    "D 192, E 128": square(70, head_dim=192, v_dim=128),
    "own scale": square(130, scale=0.5),
    "soft-cap 2": square(130, scale=0.5, softcap=2.0),
    "soft-cap 50, q of k": Case(q_len=40, k_len=200, softcap=50.0, index="listless"),
    "float16": square(200, dtype=torch.float16, heads=4, kv_heads=2),
    "transposed": square(130, layout="transposed", kv_heads=3),
    "strided": square(130, layout="strided", index="listless"),
    "own tile only": square(150, index="random:1,0,0"),
    "all three sorts": square(300, heads=2, index="random:2,2,90"),
    "lists on diagonals": square(300, heads=2, index="random:3,4,20"),
    "lists and columns": Case(q_len=100, k_len=300, heads=2, index="random:1,2,90"),
    "many columns": Case(q_len=70, k_len=300, heads=2, index="random:1,0,280"),
    **{
        f"{rows} x 64 queries, {keys} keys": square(260, heads=2, index="random:2,0,90", launch=_launch(rows, keys))
        for rows, keys in ((1, 64), (2, 64), (1, 16), (2, 16))
    },
    **{f"pages of {size}, {kind}": square(200, page=size, index=kind) for size, kind in
       ((16, "listless"), (32, "layer"), (64, "layer"), (128, "listless"), (256, "layer"))},
    "dense tail": square(200, index="listless", dense_tail=10),
    "dense tail, pages": Case(q_len=140, k_len=200, dense_tail=70, page=32),
    "pages, q of k, batch 2": Case(q_len=70, k_len=150, batch=2, heads=2, kv_heads=2, page=16),
}  # fmt: skip


def _entries(shape: tuple[int, ...], below: int, count: int, device: torch.device) -> Tensor:
    """About `count` ascending entries below `below` in the last axis, padded."""
    if count == 0:
        return empty_entries(*shape, 0, device=device)
    mask = torch.rand(*shape, below, device=device) < count / below
    return ascending(mask, max(1, int(mask.sum(-1).max())))


def _index(case: Case, q: Tensor, k: Tensor) -> SparseIndex:
    if not case.index.startswith("random:"):
        patterns = LAYER if case.index == "layer" else LISTLESS
        chosen = list(itertools.islice(itertools.cycle(patterns), case.heads))
        return LayerPlan(chosen, case.kv_heads).build(q, k, scale=case.scale)
    diagonals, tiles, columns = (int(x) for x in case.index.removeprefix("random:").split(","))
    n, heads = num_tiles(case.k_len), (case.batch, case.heads)
    others = _entries(heads, n - 1, diagonals - 1, q.device)
    own = torch.zeros(*heads, 1, dtype=torch.int32, device=q.device)
    index = SparseIndex(
        q_len=case.q_len,
        k_len=case.k_len,
        diagonals=torch.cat([own, torch.where(others == PAD, PAD, others + 1)], -1).to(torch.int32),
        tiles=_entries((*heads, num_rows(case.q_len, case.k_len)), n, tiles, q.device),
        columns=_entries(heads, case.k_len, columns, q.device),
    )
    index.validate()
    return index


def _values(shape: tuple[int, ...], case: Case, device: torch.device) -> Tensor:
    batch, heads, length, dim = shape
    if case.layout == "transposed":
        return torch.randn(batch, length, heads, dim, device=device).to(case.dtype).transpose(1, 2)
    if case.layout == "strided":
        return torch.randn(batch, heads + 1, 2 * length, 3 * dim, device=device).to(case.dtype)[:, 1:, ::2, ::3]
    return torch.randn(shape, device=device).to(case.dtype)


def paged(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(B, G, K, dim) as a cache (pages, size, G, dim) in a shuffled order, NaN wherever no key lies, and its table."""
    batch, heads, length, dim = x.shape
    each = -(-length // size)
    order = torch.randperm(batch * each + 3, generator=torch.Generator().manual_seed(length))[: batch * each]
    table = order.reshape(batch, each).to(torch.int32).to(x.device)
    cache = torch.full((batch * each + 3, size, heads, dim), float("nan"), dtype=x.dtype, device=x.device)
    rows = torch.full((batch, each * size, heads, dim), float("nan"), dtype=x.dtype, device=x.device)
    rows[:, :length] = x.transpose(1, 2)
    cache[table.long()] = rows.reshape(batch, each, size, heads, dim)
    # One more page in each row of the table than is needed, out of bounds: it must not be read.
    return cache, torch.nn.functional.pad(table, (0, 1), value=PAD)


def run(case: Case, device: torch.device) -> tuple[float, float]:
    """Largest absolute errors of out and lse against the fp32 reference; infinite where something is not written."""
    torch.manual_seed(0)
    q = _values((case.batch, case.heads, case.q_len, case.head_dim), case, device)
    k = _values((case.batch, case.kv_heads, case.k_len, case.head_dim), case, device)
    v = _values((case.batch, case.kv_heads, case.k_len, case.v_dim), case, device)
    index = with_dense_tail(_index(case, q, k), case.dense_tail)
    how: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap}
    if case.launch is not None:
        scale = case.head_dim**-0.5
        out, lse = backend.sparse_attention(q, k, v, index, scale=scale, softcap=case.softcap, launch=case.launch)
    elif case.page is None:
        out, lse = sparse_attention(q, k, v, index, **how, return_lse=True, backend="triton")
        assert out.transpose(1, 2).is_contiguous()
    else:
        (k_cache, table), (v_cache, _) = paged(k, case.page), paged(v, case.page)
        out, lse = backend.paged_sparse_attention(q, k_cache, v_cache, table, index, **how)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    expected, expected_lse = sparse_attention(
        q.float(), k.float(), v.float(), index, **how, return_lse=True, backend="reference"
    )
    return _error(out, expected), _error(lse, expected_lse)


def _error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.float() - expected).abs().nan_to_num(nan=float("inf")).max())


def poison_memory() -> None:
    """torch.empty gives NaN from here on."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    poison_memory()
    print(json.dumps({name: run(case, torch.device("cpu")) for name, case in SMALL.items()}))


if __name__ == "__main__":
    sys.exit(main())
