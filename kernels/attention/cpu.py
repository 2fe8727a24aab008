"""Sparse attention on the CPU in native code: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import derivative_wanted
from kernels.index import SparseIndex
from kernels.native import build
from kernels.ragged import Ragged

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot serve the call; None where it can."""
    if q.device.type != "cpu":
        return f"it serves tensors on the CPU, not on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    return derivative_wanted(q, k, v) or build.load()


def engines(dtype: torch.dtype) -> list[str]:
    """The engines of this processor for a dtype, fastest first: "brgemm" (AMX), "dot" (AVX-512 bf16), "float"."""
    if reason := build.load():
        raise ValueError(reason)
    found: list[str] = torch.ops.headwise.engines(dtype)
    return found


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

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by the engine "float".
    Keys and values of 8 bits become q's dtype.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
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
    pages = None if block_table is None else block_table.contiguous()
    fastest, *_ = engines(q.dtype)
    torch.ops.headwise.sparse_attention(
        *(q, k, v, *entries, ragged.flat, index.dense_tail, index.window or 0, pages),
        *(
            None if index.skip is None else index.skip.contiguous(),
            None if sinks is None else sinks.float().contiguous(),
        ),
        *(scale, softcap or 0.0, engine or fastest, out, lse, skipped),
    )
    return out, lse
