"""Sparse attention on the CPU in native code: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.copies import contiguous, with_rows
from kernels.dispatch import derivative_wanted
from kernels.index import SparseIndex
from kernels.native import build
from kernels.ragged import Ragged

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The reason why this backend cannot serve the call; None where it can."""
    if q.device.type != "cpu":
        return f"it serves tensors on the CPU, not on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    return derivative_wanted(q, k, v) or build.load()


def engines(dtype: torch.dtype) -> list[str]:
    """Return the engines of this processor for a dtype, fastest first.

    "amx" (tiles of AMX), "dot" (AVX-512 bf16), "float".
    """
    if reason := build.load():
        raise ValueError(reason)
    found: list[str] = torch.ops.headwise.engines(dtype)
    return found


def why_no_tiles() -> str | None:
    """Return the reason why the engine "amx" is not available; None where it is."""
    if reason := build.load():
        return reason
    return str(torch.ops.headwise.why_no_tiles()) or None


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    scale: float,
    softcap: float | None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    skipped: Tensor | None = None,
    engine: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.attention.launch; `engine` takes another than the fastest.

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by
    the engine "float". Keys and values of 8 bits become q's dtype."""
    q, k, v = map(with_rows, (q, k, v))
    batch, num_heads, q_len, _ = q.shape
    lse = torch.empty(batch, num_heads, q_len, dtype=torch.float32)
    if out is None:
        out = torch.empty(batch, q_len, num_heads, v.shape[-1], dtype=q.dtype).transpose(1, 2)
    if not index.batch:
        return out, lse
    ragged = index.ragged or Ragged.left_padded([index.k_len] * batch, q_len, index.k_len)
    if not ragged.covers(batch, q_len):
        out.zero_()
        lse.fill_(float("-inf"))
    entries = (x.contiguous() for x in (index.diagonals, index.tiles, index.offsets, index.columns))
    if sinks is not None:
        sinks = sinks.float()
    torch.ops.headwise.sparse_attention(
        *(q, k, v, *entries, ragged.flat, index.dense_tail, index.window or 0),
        *map(contiguous, (block_table, index.skip, sinks)),
        *(scale, softcap or 0.0, engine or engines(q.dtype)[0], out, lse, skipped),
    )
    return out, lse
