"""The device code of scores in Triton; kernels.scored.triton launches it. Importing this imports triton.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import LOG2E, load_rows


@triton.jit(do_not_specialize=["q_len", "k_len"])
def column_sums_kernel(
    q, k, lse, scores, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, num_kv_heads, group, q_len, k_len,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores (B, G, K) fp32: each key's probabilities in all queries of a KV head's query heads, added up.

    A program has KEYS keys to itself and walks the queries that see them, so that no order of programs shows in a sum.
    Programs of one KV head run side by side and read its queries while the L2 cache has them, the longest first.
    """
    tiles = (k_len + KEYS - 1) // KEYS
    kv = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * KEYS
    key = first + tl.arange(0, KEYS)
    present = key < k_len
    k += kv // num_kv_heads * k_batch + kv % num_kv_heads * k_head
    k_rows = key.to(tl.int64) * k_row
    k0 = load_rows(k, k_rows, present, 0, D0, D, True).to(q.dtype.element_ty)
    if D1 > 0:
        k1 = load_rows(k, k_rows, present, D0, D1, D, True).to(q.dtype.element_ty)

    q += kv // num_kv_heads * q_batch + kv % num_kv_heads * group * q_head
    lse += kv * group * q_len
    offset = k_len - q_len
    begin = tl.maximum(first - offset, 0)
    steps = (q_len - begin + QUERIES - 1) // QUERIES
    total = tl.zeros([KEYS], tl.float32)
    for step in tl.range(0, group * steps, num_stages=STAGES):
        head = (step // steps).to(tl.int64)
        query = begin + step % steps * QUERIES + tl.arange(0, QUERIES)
        exists = query < q_len
        q_rows = head * q_head + query.to(tl.int64) * q_row
        q0 = load_rows(q, q_rows, exists, 0, D0, D, True)
        logits = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
        if D1 > 0:
            q1 = load_rows(q, q_rows, exists, D0, D1, D, True)
            logits = tl.dot(k1, tl.trans(q1), logits, input_precision=PRECISION)
        factor = scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1); the factors of both sides are in `scale` and `softcap`.
            logits = 1.0 - 2.0 / (tl.exp2(logits * scale) + 1.0)
            factor = softcap
        whole = tl.load(lse + head * q_len + query, mask=exists, other=0.0) * LOG2E
        # What rounds off a large log-sum-exp must not make more than 1 of a probability.
        share = tl.minimum(logits * factor - whole[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
        position = tl.where(exists, query + offset, -1)
        total += tl.sum(tl.where(key[:, None] <= position[None, :], tl.exp2(share), 0.0), 1)
    tl.store(scores + kv * k_len + key, total, mask=present)
