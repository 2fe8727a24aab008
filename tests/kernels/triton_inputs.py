"""Tensors, indices and pages of a case of the Triton kernel, and its error.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, S
sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.attention import launch, sparse_attention
from kernels.attention import triton as backend
from kernels.attention.triton_launch import Launch
from kernels.index import PAD, TILE, SparseIndex, empty_entries, lists, num_rows, num_tiles
from kernels.joining import cat_sequences
from kernels.patterns import LayerPlan, make
from kernels.patterns.choose import ascending
from kernels.ragged import Ragged

LAYER = (
    make("vertical_slash", vertical=80, slash=90),
    make("block_sparse", blocks=2),
    make("a_shape", sink=70, window=100),
    make("vertical_slash", vertical=120, slash=64, last_q=16),
    make("dense"),
)
# Without block-sparse heads a program may serve two query tiles.
LISTLESS = tuple(pattern for pattern in LAYER if pattern.kind != "block_sparse")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call; `index` is "layer" (unlike heads), "listless" or "random:D,T,C" (each sort).

    Keys and values are of dtype `cache`, or of the queries'. `dense_tail` holds for all heads, or
    for head i if it is a tuple; `given` hands `out` to the call. `skip` is the bound of every head
    but the first; q and k are then such that tiles of keys are wanted more or less."""

    q_len: int
    k_len: int
    batch: int = 1
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    v_dim: int = 64
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    index: str = "layer"
    dense_tail: int | tuple[int, ...] = ()
    window: int | None = None
    skip: float | None = None
    ragged: Ragged | None = None
    page: int | None = None
    layout: str = "contiguous"
    given: bool = False
    launch: Launch | None = None
    splits: int | None = None


def square(length: int, **more: Any) -> Case:
    """As many queries as keys."""
    return Case(q_len=length, k_len=length, **more)


def padded(*lengths: int, queries: int | None = None, **more: Any) -> Case:
    """Sequences of these many keys, left-padded; the last `queries` are asked."""
    k_len = max(lengths) + 5
    q_len = queries or k_len
    ragged = Ragged.left_padded(lengths, q_len, k_len)
    return Case(q_len=q_len, k_len=k_len, batch=len(lengths), ragged=ragged, **more)


def packed(*lengths: tuple[int, int], **more: Any) -> Case:
    """Sequences of these many queries and keys, end to end, and a few rows of nobody after them."""
    queries, keys = ([0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True))
    return Case(
        q_len=queries[-1] + 3, k_len=keys[-1] + 2, ragged=Ragged.packed(queries, keys), **more
    )


def run(case: Case, device: torch.device) -> tuple[float, float]:
    """Largest errors of out and lse against the fp32 reference; infinite where not written."""
    torch.manual_seed(0)
    q = _values((case.batch, case.heads, case.q_len, case.head_dim), case, device)
    k = _values((case.batch, case.kv_heads, case.k_len, case.head_dim), case, device)
    v = _values((case.batch, case.kv_heads, case.k_len, case.v_dim), case, device)
    if case.skip is not None:
        strength = torch.randn(
            *k.shape[:2], num_tiles(case.k_len), 1, device=device
        ).repeat_interleave(TILE, 2)
        want = torch.randn(case.head_dim, device=device)
        q, k = q + want.to(q.dtype), k / 2 + (strength[:, :, : case.k_len] * want).to(k.dtype)
    if case.ragged is not None:
        _poison_padding(q, k, v, case.ragged)
    if case.cache is not None:
        k, v = k.to(case.cache), v.to(case.cache)
    index = _index(case, q, k.to(q.dtype))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    sinks = torch.randn(case.heads, device=device) * 2 if case.sinks else None
    how: dict[str, Any] = {"scale": scale, "softcap": case.softcap, "sinks": sinks}
    counts = [
        torch.zeros(index.diagonals.shape[:2], dtype=torch.int32, device=device) for _ in range(2)
    ]
    expected, expected_lse = sparse_attention(
        q.float(),
        k.float(),
        v.float(),
        index,
        **how,
        return_lse=True,
        backend="reference",
        skipped=counts[0],
    )
    how["skipped"] = counts[1]
    buffer = torch.full(
        (*q.shape[:3], case.v_dim + 3), float("nan"), dtype=case.dtype, device=device
    )
    if case.given:
        how["out"] = buffer[..., 1:-2]
    if case.page is not None:
        index, k, v, how["block_table"] = _paged_call(index, k, v, case.page)
    if case.launch is None and case.splits is None:
        out, lse = launch(q, k, v, index, **how, backend="triton")
    else:
        out, lse = backend.sparse_attention(
            q, k, v, index, **how, launch=case.launch, splits=case.splits
        )
    assert torch.equal(*counts) and bool(counts[0].any()) == (case.skip is not None), counts
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    if case.given:
        assert out is how["out"] and bool(buffer[..., [0, -2, -1]].isnan().all())
    else:
        assert out.transpose(1, 2).is_contiguous()
    return _error(out, expected), _error(lse, expected_lse)


def _error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    # Infinite log-sum-exps of rows that belong to nobody are equal.
    error = torch.where(actual == expected, 0.0, (actual.float() - expected).abs())
    return float(error.nan_to_num(nan=float("inf")).max())


def _values(shape: tuple[int, ...], case: Case, device: torch.device) -> Tensor:
    batch, heads, length, dim = shape
    if case.layout == "transposed":
        return torch.randn(batch, length, heads, dim, device=device).to(case.dtype).transpose(1, 2)
    if case.layout == "strided":
        return torch.randn(batch, heads + 1, 2 * length, 3 * dim, device=device).to(case.dtype)[
            :, 1:, ::2, ::3
        ]
    return torch.randn(shape, device=device).to(case.dtype)


def _poison_padding(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> None:
    """NaN in every row that belongs to no sequence."""
    for x, starts, lengths in (
        (q, ragged.q_starts, ragged.q_lens),
        *((x, ragged.k_starts, ragged.k_lens) for x in (k, v)),
    ):
        outside = torch.ones(x.shape[0], 1, x.shape[2], 1, dtype=torch.bool, device=x.device)
        for row, start, length in zip(ragged.rows, starts, lengths, strict=True):
            outside[row, :, start : start + length] = False
        x.masked_fill_(outside, float("nan"))


def _index(case: Case, q: Tensor, k: Tensor) -> SparseIndex:
    if not case.index.startswith("random:"):
        patterns = LAYER if case.index == "layer" else LISTLESS
        chosen = list(itertools.islice(itertools.cycle(patterns), case.heads))
        plan = LayerPlan(chosen, case.kv_heads)
        index = plan.build(q, k, scale=case.scale, window=case.window, ragged=case.ragged)
    elif case.ragged is None:
        index = _random_index(case, case.batch, case.q_len, case.k_len, q.device)
    else:
        parts = [
            _random_index(case, 1, q_len, k_len, q.device) for q_len, k_len in case.ragged.lengths
        ]
        index = cat_sequences(parts, case.ragged)
    tail = (case.dense_tail,) * case.heads if isinstance(case.dense_tail, int) else case.dense_tail
    index = replace(index, dense_tail=tail, window=case.window)
    if case.skip is not None:
        bounds = torch.full(index.diagonals.shape[:2], case.skip, device=q.device)
        bounds[:, 0] = -torch.inf
        index = replace(index, skip=bounds)
    index.validate()
    return index


def _random_index(
    case: Case, batch: int, q_len: int, k_len: int, device: torch.device
) -> SparseIndex:
    diagonals, tiles, columns = (int(x) for x in case.index.removeprefix("random:").split(","))
    n, heads = num_tiles(k_len), (batch, case.heads)
    others = _entries(heads, n - 1, diagonals - 1, device)
    own = torch.zeros(*heads, 1, dtype=torch.int32, device=device)
    return SparseIndex(
        q_len=q_len,
        k_len=k_len,
        diagonals=torch.cat([own, torch.where(others == PAD, PAD, others + 1)], -1).to(torch.int32),
        **lists(_entries((*heads, num_rows(q_len, k_len)), n, tiles, device)),
        columns=_entries(heads, k_len, columns, device),
    )


def _entries(shape: tuple[int, ...], below: int, count: int, device: torch.device) -> Tensor:
    """About `count` ascending entries below `below` in the last axis, padded."""
    if count == 0:
        return empty_entries(*shape, 0, device=device)
    mask = torch.rand(*shape, below, device=device) < count / max(1, below)
    return torch.nn.functional.pad(ascending(mask, below), (0, 1), value=PAD)


def _paged_call(
    index: SparseIndex, k: Tensor, v: Tensor, size: int
) -> tuple[SparseIndex, Tensor, Tensor, Tensor]:
    """The same call with its keys in pages: index, caches and block table."""
    ragged = index.ragged
    if ragged is None:
        keys, values = list(k), list(v)
    else:
        places = list(zip(ragged.rows, ragged.k_starts, ragged.k_lens, strict=True))
        keys, values = (
            [x[row, :, start : start + length] for row, start, length in places] for x in (k, v)
        )
        index = replace(index, ragged=replace(ragged, k_starts=(0,) * len(ragged)))
    (k_cache, table), (v_cache, _) = paged(keys, size), paged(values, size)
    return index, k_cache, v_cache, table


def paged(sequences: Sequence[Tensor] | Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(G, K, dim) of each sequence in a shuffled cache, NaN elsewhere; and its table."""
    heads, _, dim = sequences[0].shape
    counts = [-(-x.shape[1] // size) for x in sequences]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(size)).to(
        torch.int32
    )
    cache = sequences[0].new_full((len(order), size, heads, dim), float("nan"))
    # Places that need no page name one out of bounds, at least one in each row: they must not be
    # read.
    table = torch.full((len(sequences), max(counts) + 1), PAD, dtype=torch.int32)
    for s, (x, pages) in enumerate(zip(sequences, order[:-3].split(counts), strict=True)):
        rows = x.new_full((len(pages) * size, heads, dim), float("nan"))
        rows[: x.shape[1]] = x.transpose(0, 1)
        cache[pages.long()] = rows.unflatten(0, (-1, size))
        table[s, : len(pages)] = pages
    return cache, table.to(cache.device)
