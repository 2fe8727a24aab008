"""What a call of decode attention must hold to before a backend sees it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim, E value dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.attention.checks import check_dense, check_dtypes, check_sinks
from kernels.index import check_window

# More queries than this are a prefill: sparse_attention shares the reading of keys among them better. Only scores are
# summed over more.
MAX_QUERIES = 16


def check(
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
    """Raise ValueError, in one line with the values, where the arguments do not go together. Reads no data."""
    check_dense(q=q, k=k, v=v)
    optional = {"tokens": tokens, "starts": starts, "ends": ends, "block_table": block_table}
    check_dense(**{name: x for name, x in optional.items() if x is not None})
    _check_tensors(q, k, v, paged=block_table is not None)
    bare = all(x is None for x in (tokens, starts, ends, window, block_table, sinks))
    if q.shape[2] > MAX_QUERIES and not (bare and scores == "sum"):
        raise ValueError(f"decode takes 1 to {MAX_QUERIES} queries, got {q.shape[2]} (more are a prefill)")
    if q.shape[2] > max(MAX_QUERIES, k.shape[2]):
        raise ValueError(f"queries are the last of the keys: got {q.shape[2]} queries and {k.shape[2]} keys")
    check_sinks(sinks, q.shape[1])
    batch, num_kv_heads = q.shape[0], k.shape[1 if block_table is None else 2]
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
            raise ValueError(f"{name} must be int32 ({batch},), got {bounds.dtype} {tuple(bounds.shape)}")
    if block_table is not None:
        _check_pages(k, v, block_table, batch)
    tensors = [x for x in (q, k, v, tokens, starts, ends, block_table, sinks) if x is not None]
    if len(devices := {x.device for x in tensors}) > 1:
        raise ValueError(f"all tensors of a call must share a device, got {', '.join(sorted(map(str, devices)))}")
    check_window(window)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}")
    if scores not in ("none", "sum", "max"):
        raise ValueError(f"scores must be 'none', 'sum' or 'max', got {scores!r}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be 4-D (B, heads, length, dim), got {q.dim()}, {k.dim()}, {v.dim()}-D")
    if k.shape[:3] != v.shape[:3] or k.shape[-1] != q.shape[-1] or not (paged or k.shape[0] == q.shape[0]):
        raise ValueError(f"shapes do not go together: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not q.shape[-1] or not v.shape[-1]:
        raise ValueError(f"head dims must be positive, got {q.shape[-1]} and {v.shape[-1]}")
    if not q.shape[2]:
        raise ValueError(f"decode takes 1 to {MAX_QUERIES} queries, got 0")
    if not all(k.shape[:3]):
        raise ValueError(f"the cache is empty: k {tuple(k.shape)}")
    if q.shape[1] % (num_kv_heads := k.shape[2 if paged else 1]) or not q.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {num_kv_heads} KV heads")
    check_dtypes(q, k, v)


def _check_pages(k: Tensor, v: Tensor, table: Tensor, batch: int) -> None:
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch or not table.shape[1]:
        raise ValueError(f"the block table must be int32 ({batch}, n), got {table.dtype} {tuple(table.shape)}")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the last dimension of a paged cache must be contiguous")
