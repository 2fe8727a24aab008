"""What caches that keep tokens by their scores need, in native code on the CPU: cpu.cpp, compiled at first use.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import cpu as attention
from kernels.native import build


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot serve the call; None where it can."""
    if k.dtype != q.dtype:
        return f"it reads keys and values of the queries' dtype, not {k.dtype}"
    return attention.supports(q, k, v)


def serves(x: Tensor) -> bool:
    """Whether native code drops tokens of a cache that x belongs to; torch does where it does not."""
    return x.device.type == "cpu" and build.load() is None


def scored_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None, engine: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.scored.scored_attention; any number of queries. `engine` takes another than the fastest."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.headwise.scored_attention(
        q, k, v, scale, softcap or 0.0, engine or attention.engines(q.dtype)[0]
    )
    return found


def drop_lowest(
    keys: Tensor, values: Tensor, scores: Tensor, positions: Tensor, *, rows: int, latest: int, queries: int | None
) -> None:
    """See kernels.scored.drop_lowest."""
    torch.ops.headwise.drop_lowest(keys, values, scores, positions, rows, latest, queries or 0)
