"""Sparse attention on the CPU in native code: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from kernels.copies import contiguous, with_rows
from kernels.dispatch import derivative_wanted
from kernels.index import SparseIndex, no_lists, num_rows
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
    """The engines of this processor for a dtype, fastest first.

    "amx" (its tiles), "brgemm" (AMX by torch's own products), "dot" (AVX-512 bf16), "float".
    """
    if reason := build.load():
        raise ValueError(reason)
    found: list[str] = torch.ops.headwise.engines(dtype)
    if "amx" in found and why_no_tiles():
        found.remove("amx")
    return found


@functools.cache
def why_no_tiles() -> str | None:
    """The reason why the engine "amx" does not serve here; None where it does.

    It serves where HEADWISE_AMX=1 asks for it, until a processor with AMX has measured it
    (benchmarks/cpu_engines.py). Before its first use in a process it is compared with the engine
    "dot" on one small random case."""
    if reason := build.load():
        return reason
    if missing := str(torch.ops.headwise.why_no_tiles()):
        return missing
    if os.environ.get("HEADWISE_AMX") != "1":
        return "not measured yet: HEADWISE_AMX=1 asks for it"
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 100, 80), (1, 2, 330, 80), (1, 2, 330, 48)
    q, k, v = (torch.randn(s, generator=generator, device="cpu").to(torch.bfloat16) for s in shapes)
    # The last query tiles of six, each with two key tiles and some columns.
    index = SparseIndex.built(
        q_len=100,
        k_len=330,
        diagonals=torch.tensor([0, 2], dtype=torch.int32, device="cpu")
        .expand(1, 4, -1)
        .contiguous(),
        **no_lists(1, 4, num_rows(100, 330), device=q.device),
        columns=torch.tensor([1, 70, 71, 130, 200], dtype=torch.int32, device="cpu")
        .expand(1, 4, -1)
        .contiguous(),
        window=300,
    )
    ours, theirs = (
        sparse_attention(q, k, v, index, scale=80**-0.5, softcap=None, engine=engine)
        for engine in ("amx", "dot")
    )
    agrees = all(
        torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02)
        for a, b in zip(ours, theirs, strict=True)
    )
    if not agrees:
        return "its results are not those of the engine without tiles"
    return None


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
