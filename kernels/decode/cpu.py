"""Decode over all or chosen keys on the CPU in native code: cpu.cpp, compiled at first use.

With summed scores of any number of queries: sums.cpp.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.attention import cpu as attention
from kernels.copies import contiguous, with_rows
from kernels.native import build


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The reason why this backend cannot serve the call; None where it can."""
    return attention.supports(q, k, v)


@functools.cache
def engines(dtype: torch.dtype) -> list[str]:
    """Engines of this build for a dtype, fastest first: "dot" (AVX-512 bf16), "float"."""
    if reason := build.load():
        raise ValueError(reason)
    found: list[str] = torch.ops.headwise.decode_engines(dtype)
    return found


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tokens: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    scores: str,
    block_table: Tensor | None,
    sinks: Tensor | None = None,
    engine: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See kernels.decode.decode_attention; `engine` takes another than the fastest.

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by
    the engine "float"."""
    q, k, v = map(with_rows, (q, k, v))
    if sinks is not None:
        sinks = sinks.float()
    given = map(contiguous, (tokens, starts, ends, block_table, sinks))
    out, lse, mass = torch.ops.headwise.decode_attention(
        q,
        k,
        v,
        *given,
        window or 0,
        scale,
        softcap or 0.0,
        scores,
        engine or engines(q.dtype)[0],
    )
    if scores == "none":
        mass = None
    return out, lse, mass


def with_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
    engine: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """decode_attention with summed scores for any number of queries, the last Q of K.

    Rows of attention exist for 64 queries of a head at a time, one such tile a thread. `engine`
    takes another than the fastest (kernels.attention.cpu.engines)."""
    q, k, v = map(with_rows, (q, k.to(q.dtype), v.to(q.dtype)))
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.headwise.attention_with_sums(
        q, k, v, scale, softcap or 0.0, engine or attention.engines(q.dtype)[0]
    )
    return found
