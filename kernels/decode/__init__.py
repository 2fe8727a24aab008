"""Decode: attention of a few queries over all or chosen keys, with scores on request.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kernels import registry
from kernels.call import MAX_QUERIES, DecodeCall, Decoded
from kernels.logits import PLAIN, Logits

__all__ = ["MAX_QUERIES", "DecodeCall", "Decoded", "Logits", "decode_attention"]


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    logits: Logits = PLAIN,
    tokens: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    scores: Literal["none", "sum", "max"] = "none",
    block_table: Tensor | None = None,
    backend: str = "auto",
) -> Decoded:
    """Causal attention of each sequence's last queries, split over keys (Flash-Decoding; Dao).

    Query i of sequence b has row ends[b] - Q + i of its keys and sees the rows up to it.
    One that sees no row gets zeros, a log-sum-exp of -inf (or its sink's logit), and adds nothing
    to the scores. No tensor is read on the host.

    Args:
        q: (B, H, Q, D) queries, at most MAX_QUERIES; with summed scores and no other keyword but
            logits (neither sinks nor a window) and backend, up to K (H2O's scores of a prompt; H2O,
            section 4).
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G). With a block table (pages,
            page size, G, D). As in sparse_attention, keys and values may be float8.
        v: (B, G, K, E) values. With a block table (pages, page size, G, E). One that no query sees
            is not read.
        logits: scale, soft-cap, learned sinks and window. The log-sum-exp counts a sink, and so do
            the scores' probabilities.
        tokens: int32 rows to attend to, (B, C) for all or (B, G, C) for each KV head: ascending, at
            most once each, filled up at the end with kernels.index.PAD. None attends to all rows.
        starts: (B,) int32, the first row of each sequence: left padding before it is not seen. 0 if
            None.
        ends: (B,) int32, the row behind each sequence's last, for caches with room to grow. K if
            None.
        scores: "sum" returns for each key the sum of its probabilities over all queries and
            query heads of a KV head (accumulated by H2O), "max" the largest of them (used by
            OmniKV's selection); rows that no query sees get 0.
        block_table: (B, n) int32: the page that holds rows i * page size and on; K is then n * page
            size. Entries from a sequence's end on are not read.
        backend: "auto" takes the fastest that serves the call, never the slow reference; a name
            takes that one or raises.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; a size, scale or soft-cap out
            of range; a named backend that cannot serve the call; with "auto" no kernel can
            (kernels.registry.NoKernelError). On the CPU also tokens that do not
            ascend, and starts, ends or pages that lie outside the cache.
    """
    call = DecodeCall(
        q,
        k,
        v,
        logits=logits,
        tokens=tokens,
        starts=starts,
        ends=ends,
        scores=scores,
        block_table=block_table,
    )
    decoded: Decoded = registry.run("decode", call, backend)
    return decoded
