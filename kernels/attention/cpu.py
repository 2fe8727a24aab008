"""Sparse attention on the CPU in native code: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.call import AttentionCall, Operands, derivative_wanted
from kernels.copies import contiguous, with_rows
from kernels.native import build
from kernels.ragged import Ragged

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(call: Operands) -> str | None:
    """The reason why this backend cannot serve the call; None where it can."""
    q = call.q
    # Every decode step runs this, and q.device would take longer.
    if not q.is_cpu or q.dtype not in _DTYPES:
        return unsupported(q.device, q.dtype)
    return derivative_wanted(call) or build.load()


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why native code does not read tensors of such a device and dtype."""
    if device.type != "cpu":
        return f"it serves tensors on the CPU, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {dtype}"
    return None


def engines(dtype: torch.dtype) -> list[str]:
    """Return the engines of this processor for a dtype, fastest first.

    "amx" (tiles of AMX), "dot" (AVX-512 bf16), "float".
    """
    if reason := build.load():
        raise ValueError(reason)
    names: list[str] = torch.ops.headwise.engines(dtype)
    return names


def why_no_tiles() -> str | None:
    """Return the reason why the engine "amx" is not available; None where it is."""
    if reason := build.load():
        return reason
    return str(torch.ops.headwise.why_no_tiles()) or None


def run(call: AttentionCall, *, engine: str | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call; `engine` takes another than the fastest.

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by
    the engine "float". Keys and values of 8 bits become q's dtype.
    """
    index = call.index
    out = call.out
    q, k, v = map(with_rows, (call.q, call.k, call.v))
    batch, num_heads, q_len, _ = q.shape
    lse = torch.empty(batch, num_heads, q_len, dtype=torch.float32, device="cpu")
    if out is None:
        out = torch.empty(
            batch, q_len, num_heads, v.shape[-1], dtype=q.dtype, device="cpu"
        ).transpose(1, 2)
    if not index.batch:
        return out, lse
    ragged = index.ragged or Ragged.left_padded([index.k_len] * batch, q_len, index.k_len)
    if not ragged.covers(batch, q_len):
        out.zero_()
        lse.fill_(float("-inf"))
    entries = (x.contiguous() for x in (index.diagonals, index.tiles, index.offsets, index.columns))
    torch.ops.headwise.sparse_attention(
        *(q, k, v, *entries, ragged.flat, index.dense_tail, index.window or 0),
        *map(contiguous, (call.block_table, index.skip, call.logits.wide_sinks)),
        *call.logits.numbers(q.shape[3]),
        *(engine or engines(q.dtype)[0], out, lse, call.skipped),
    )
    return out, lse
