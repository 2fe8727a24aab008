"""Checks of a call of sparse attention or of decode, before a backend sees it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.index import SparseIndex, check_window

# More queries than this are a prefill: sparse_attention shares the reading of keys among them
# better. Only scores are summed over more.
MAX_QUERIES = 16


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    block_table: Tensor | None,
    out: Tensor | None,
    sinks: Tensor | None,
    skipped: Tensor | None = None,
) -> None:
    """Raise ValueError, in one line with the values, where the arguments do not go together.

    Reads no data but that of an index made by hand, once (SparseIndex.validate).
    """
    check_dense(q=q, k=k, v=v)
    if block_table is not None:
        check_dense(block_table=block_table)
    if out is not None:
        check_dense(out=out)
    if not isinstance(index, SparseIndex):
        raise ValueError(f"index must be a SparseIndex, got {type(index).__name__}")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be 4-D (B, heads, length, dim), got {q.dim()}, {k.dim()}, {v.dim()}-D"
        )
    # Each look at a shape makes it anew.
    q_shape = q.shape
    k_shape = k.shape
    v_shape = v.shape
    if k_shape[:3] != v_shape[:3] or k_shape[3] != q_shape[3]:
        raise ValueError(
            f"shapes do not go together: q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"
        )
    if not q_shape[3] or not v_shape[3]:
        raise ValueError(f"head dims must be positive, got {q_shape[3]} and {v_shape[3]}")
    check_dtypes(q, k, v)
    index.validate()
    tensors = [
        x for x in (q, k, v, index.diagonals, block_table, out, sinks, skipped) if x is not None
    ]
    if len(devices := {x.device for x in tensors}) > 1:
        raise ValueError(
            f"all tensors of a call must share a device, got {', '.join(sorted(map(str, devices)))}"
        )
    num_heads = q_shape[1]
    num_kv_heads = _num_kv_heads(k_shape, paged=block_table is not None)
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} KV heads")
    if index.num_heads != num_heads:
        raise ValueError(f"index is for {index.num_heads} heads, q has {num_heads}")
    check_sinks(sinks, num_heads)
    if skipped is not None and (
        skipped.dtype != torch.int32
        or skipped.shape != index.diagonals.shape[:2]
        or not skipped.is_contiguous()
    ):
        expected = f"contiguous int32 {tuple(index.diagonals.shape[:2])}"
        raise ValueError(f"skipped must be {expected}, got {skipped.dtype} {tuple(skipped.shape)}")
    _check_lengths(q_shape, k_shape, index, paged=block_table is not None)
    if block_table is not None:
        _check_pages(k, v, index, block_table)
    if out is None:
        return
    shape = (*q_shape[:3], v_shape[3])
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out must be {q.dtype} {shape} with its last dimension contiguous, got {out.dtype} "
            f"{tuple(out.shape)}"
        )
    if _overlaps(out):
        raise ValueError(
            f"out must have a place of its own for each element, got strides {out.stride()} for "
            f"{shape}"
        )


def _num_kv_heads(k: Sequence[int], *, paged: bool) -> int:
    """KV heads of keys: (B, G, K, D), or in pages (pages, page size, G, D)."""
    if paged:
        return k[2]
    return k[1]


def check_dense(**given: object) -> None:
    """Raise ValueError for what is no tensor or not laid out by strides (sparse, mkldnn ...)."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}")


# What caches of 8 bits hold; both are exact in 16.
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless keys and values are of the queries' floating dtype or of 8 bits."""
    if k.dtype != v.dtype or k.dtype not in (q.dtype, *EIGHT_BITS) or not q.is_floating_point():
        raise ValueError(
            f"q, k and v must share a floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Raise ValueError for sinks that are not one logit a query head."""
    if sinks is None:
        return
    check_dense(sinks=sinks)
    if tuple(sinks.shape) != (num_heads,) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be floating ({num_heads},), got {sinks.dtype} {tuple(sinks.shape)}"
        )


def _overlaps(out: Tensor) -> bool:
    """True if two elements may share a place; views cut out of a larger tensor do not."""
    reach = 0
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _check_lengths(q: Sequence[int], k: Sequence[int], index: SparseIndex, *, paged: bool) -> None:
    """Raise ValueError where the index is of other lengths.

    Args:
        q: its shape.
        k: its shape.
    """
    if index.ragged is not None:
        if fault := index.ragged.fault(q, None if paged else k):
            raise ValueError(fault)
        return
    if not paged and k[0] != q[0]:
        raise ValueError(f"shapes do not go together: q {tuple(q)}, k {tuple(k)}")
    if paged:
        k_len = index.k_len
    else:
        k_len = k[2]
    if not 0 < q[2] <= k_len:
        raise ValueError(f"query length must be between 1 and key length {k_len}, got {q[2]}")
    expected = (q[0], q[2], k_len)
    if (found := (index.batch, index.q_len, index.k_len)) != expected:
        raise ValueError(f"index is for (B, Q, K) = {found}, the call has {expected}")


def _check_pages(k: Tensor, v: Tensor, index: SparseIndex, table: Tensor) -> None:
    needed = 0
    if k.shape[1]:
        needed = -(-index.k_len // k.shape[1])
    if (
        table.dim() != 2
        or table.dtype != torch.int32
        or table.shape[0] != index.batch
        or table.shape[1] < needed
    ):
        raise ValueError(
            f"the block table must be int32 ({index.batch}, at least {needed}), got {table.dtype} "
            f"{tuple(table.shape)}"
        )
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the last dimension of a paged cache must be contiguous")


def check_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    scores: str,
    block_table: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError, in one line with the values, for arguments that do not go together.

    Reads no data.
    """
    check_dense(q=q, k=k, v=v)
    optional = {"tokens": tokens, "starts": starts, "ends": ends, "block_table": block_table}
    check_dense(**{name: x for name, x in optional.items() if x is not None})
    _check_tensors(q, k, v, paged=block_table is not None)
    bare = all(x is None for x in (tokens, starts, ends, window, block_table, sinks))
    if q.shape[2] > MAX_QUERIES and not (bare and scores == "sum"):
        raise ValueError(
            f"decode takes 1 to {MAX_QUERIES} queries, got {q.shape[2]} (more are a prefill)"
        )
    if q.shape[2] > max(MAX_QUERIES, k.shape[2]):
        raise ValueError(
            f"queries are the last of the keys: got {q.shape[2]} queries and {k.shape[2]} keys"
        )
    check_sinks(sinks, q.shape[1])
    batch = q.shape[0]
    num_kv_heads = _num_kv_heads(k.shape, paged=block_table is not None)
    if tokens is not None and (
        tokens.dtype != torch.int32
        or tokens.shape[:-1] not in ((batch,), (batch, num_kv_heads))
        or tokens.shape[-1] == 0
    ):
        raise ValueError(
            f"tokens must be int32 ({batch}, C) or ({batch}, {num_kv_heads}, C) with C > 0, "
            f"got {tokens.dtype} {tuple(tokens.shape)}"
        )
    for name, bounds in (("starts", starts), ("ends", ends)):
        if bounds is not None and (bounds.dtype != torch.int32 or tuple(bounds.shape) != (batch,)):
            raise ValueError(
                f"{name} must be int32 ({batch},), got {bounds.dtype} {tuple(bounds.shape)}"
            )
    if block_table is not None:
        _check_table(k, v, block_table, batch)
    tensors = [x for x in (q, k, v, tokens, starts, ends, block_table, sinks) if x is not None]
    if len(devices := {x.device for x in tensors}) > 1:
        raise ValueError(
            f"all tensors of a call must share a device, got {', '.join(sorted(map(str, devices)))}"
        )
    check_window(window)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}")
    if scores not in ("none", "sum", "max"):
        raise ValueError(f"scores must be 'none', 'sum' or 'max', got {scores!r}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be 4-D (B, heads, length, dim), got {q.dim()}, {k.dim()}, {v.dim()}-D"
        )
    if (
        k.shape[:3] != v.shape[:3]
        or k.shape[-1] != q.shape[-1]
        or not (paged or k.shape[0] == q.shape[0])
    ):
        raise ValueError(
            f"shapes do not go together: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not q.shape[-1] or not v.shape[-1]:
        raise ValueError(f"head dims must be positive, got {q.shape[-1]} and {v.shape[-1]}")
    if not q.shape[2]:
        raise ValueError(f"decode takes 1 to {MAX_QUERIES} queries, got 0")
    if not all(k.shape[:3]):
        raise ValueError(f"the cache is empty: k {tuple(k.shape)}")
    num_kv_heads = _num_kv_heads(k.shape, paged=paged)
    if q.shape[1] % num_kv_heads or not q.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {num_kv_heads} KV heads")
    check_dtypes(q, k, v)


def _check_table(k: Tensor, v: Tensor, table: Tensor, batch: int) -> None:
    if (
        table.dtype != torch.int32
        or table.dim() != 2
        or table.shape[0] != batch
        or not table.shape[1]
    ):
        raise ValueError(
            f"the block table must be int32 ({batch}, n), got {table.dtype} {tuple(table.shape)}"
        )
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the last dimension of a paged cache must be contiguous")
