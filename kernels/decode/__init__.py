"""Decode: attention of a few queries over all or chosen keys, with scores on request.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

import kernels.dispatch as dispatch
from kernels.backend import DecodeBackend
from kernels.checks import MAX_QUERIES, check_decode

__all__ = ["MAX_QUERIES", "Decoded", "decode_attention"]


class Decoded(NamedTuple):
    """Results of decode_attention.

    Attributes:
        out: (B, H, Q, E) in q's dtype, a transposed view of a contiguous (B, Q, H, E).
        lse: (B, H, Q) fp32, the natural log-sum-exp of each query's logits, its sink's included.
        scores: (B, G, C), or (B, G, K) without tokens, fp32; None if not asked for.
    """

    out: Tensor
    lse: Tensor
    scores: Tensor | None


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tokens: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    scores: Literal["none", "sum", "max"] = "none",
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Decoded:
    """Causal attention of each sequence's last queries, split over keys (Flash-Decoding; Dao).

    Query i of sequence b stands at row ends[b] - Q + i of its keys and sees the rows up to there.
    One that sees no row gets zeros, a log-sum-exp of -inf (or its sink's logit), and adds nothing
    to the scores. No tensor is read on the host.

    Args:
        q: (B, H, Q, D) queries, at most MAX_QUERIES; any number of all K keys where their scores
            are summed and no other keyword but scale, softcap and backend is given (H2O's scores of
            a prompt; H2O, section 4).
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G). With a block table (pages,
            page size, G, D). As in sparse_attention, keys and values may be float8.
        v: (B, G, K, E) values. With a block table (pages, page size, G, E). One that no query sees
            is not read.
        tokens: int32 rows to attend to, (B, C) for all or (B, G, C) for each KV head: ascending, at
            most once each, filled up at the end with kernels.index.PAD. None attends to all rows.
        starts: (B,) int32, the first row of each sequence: left padding before it is not seen. 0 if
            None.
        ends: (B,) int32, the row behind each sequence's last, for caches with room to grow. K if
            None.
        window: a query sees itself and the window - 1 rows before it; None is all of them.
        scale: factor on the logits; D ** -0.5 if None.
        softcap: logits become softcap * tanh(logits / softcap).
        scores: "sum" gives each key its probabilities in all queries of a KV head's query heads,
            added up (what H2O accumulates); "max" the largest of them (what OmniKV chooses by);
            rows that nobody sees get 0.
        block_table: (B, n) int32: the page that holds rows i * page size and on; K is then n * page
            size. Entries from a sequence's end on are not read.
        sinks: (H,) a learned logit of each query head that takes its share of every softmax and has
            no value (gpt-oss). The log-sum-exp counts it, and so do the scores' probabilities.
        backend: "auto" takes the fastest that serves the call; a name takes that one or raises.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; a size, scale or soft-cap out
            of range; a named backend that cannot serve the call. On the CPU also tokens that do not
            ascend, and starts, ends or pages that lie outside the cache.
    """
    check_decode(q, k, v, tokens, starts, ends, window, scale, softcap, scores, block_table, sinks)
    if scale is None:
        factor = q.shape[-1] ** -0.5
    else:
        factor = float(scale)

    def call(module: DecodeBackend) -> Decoded:
        if q.shape[2] > MAX_QUERIES:
            return Decoded(*module.with_sums(q, k, v, scale=factor, softcap=softcap))
        return Decoded(
            *module.decode_attention(
                q,
                k,
                v,
                tokens=tokens,
                starts=starts,
                ends=ends,
                window=window,
                scale=factor,
                softcap=softcap,
                scores=scores,
                block_table=block_table,
                sinks=sinks,
            )
        )

    return dispatch.serve(backend, call, q, k, v, op="decode", sinks=sinks)
