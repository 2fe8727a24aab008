"""Decode over all or chosen keys on the CPU in native code: cpu.cpp, compiled at first use.

With summed scores of any number of queries: sums.cpp.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim.
"""

from __future__ import annotations

import functools

import torch

from kernels.attention import cpu as attention
from kernels.call import MAX_QUERIES, DecodeCall, Decoded
from kernels.copies import contiguous, with_rows
from kernels.native import build

supports = attention.supports


@functools.cache
def engines(dtype: torch.dtype) -> list[str]:
    """Engines of this build for a dtype, fastest first: "dot" (AVX-512 bf16), "float"."""
    if reason := build.load():
        raise ValueError(reason)
    names: list[str] = torch.ops.headwise.decode_engines(dtype)
    return names


def run(call: DecodeCall, *, engine: str | None = None) -> Decoded:
    """Results of a call; `engine` takes another than the fastest.

    float16 is computed in float32. bfloat16 multiplies in bfloat16 and adds in float32, except by
    the engine "float".
    """
    q = call.q
    if q.shape[2] > MAX_QUERIES:
        return _with_sums(call, engine)
    logits = call.logits
    scores = call.scores
    out, lse, mass = torch.ops.headwise.decode_attention(
        with_rows(q),
        with_rows(call.k),
        with_rows(call.v),
        contiguous(call.tokens),
        contiguous(call.starts),
        contiguous(call.ends),
        contiguous(call.block_table),
        contiguous(logits.wide_sinks),
        logits.window or 0,
        *logits.numbers(q.shape[3]),
        scores,
        engine or engines(q.dtype)[0],
    )
    if scores == "none":
        mass = None
    return Decoded(out, lse, mass)


def _with_sums(call: DecodeCall, engine: str | None) -> Decoded:
    """Results of a prompt, with summed scores.

    Rows of attention exist for 64 queries of a head at a time, one such tile a thread. `engine`
    takes another than the fastest (kernels.attention.cpu.engines).
    """
    dtype = call.q.dtype
    q, k, v = map(with_rows, (call.q, call.k.to(dtype), call.v.to(dtype)))
    return Decoded(
        *torch.ops.headwise.attention_with_sums(
            q, k, v, *call.logits.numbers(q.shape[3]), engine or attention.engines(dtype)[0]
        )
    )
