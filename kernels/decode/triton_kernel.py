"""Device code of decode in Triton; kernels.decode.triton launches it. Imports triton.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim, R = Q * H / G query rows of a KV head (all queries of its first query head, then those
of its second), S splits, N places: C, or K where no keys are chosen.

All query rows of a KV head are the rows of one product, so that its keys are read once for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_step import (
    LOG2E,
    LOWEST,
    load_rows,
    widened,
)

PAD = tl.constexpr(2**31 - 1)


@triton.jit
def _bounds(
    starts,
    ends,
    batch,
    q_len,
    k_len,
    window,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The rows that some query of a sequence sees: from the first, up to before the second."""
    first = 0
    if STARTS:
        first = tl.maximum(tl.load(starts + batch), 0)
    end = k_len
    if ENDS:
        end = tl.minimum(tl.load(ends + batch), k_len)
    if WINDOW:
        first = tl.maximum(first, end - q_len - window + 1)
    return first, end


@triton.jit
def _keys(
    queries, k, v, tokens, pages, kept, scale, softcap, row, alive, position, first, end, begin,
    stop, window,
    k_batch, k_row, v_batch, v_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Unnormalised output, maximum and sum over the places begin ... stop."""
    at_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # The address of a selected or paged key takes two loads, which need two stages more to be as
    # far ahead.
    for start in tl.range(
        begin, stop, KEYS, num_stages=STAGES if PAGE == 0 and not TOKENS else STAGES + 2
    ):
        place = start + tl.arange(0, KEYS)
        key = place
        if TOKENS:
            key = tl.load(tokens + place, mask=place < stop, other=PAD)
        present = (place < stop) & (key >= first) & (key < end)
        key = tl.where(present, key, 0)
        if PAGE == 0:
            k_rows = key.to(tl.int64) * k_row
            v_rows = key.to(tl.int64) * v_row
        else:
            page = tl.load(pages + key // PAGE, mask=present, other=0).to(tl.int64)
            slot = (key % PAGE).to(tl.int64)
            k_rows = page * k_batch + slot * k_row
            v_rows = page * v_batch + slot * v_row
        keys = tl.load(
            k + k_rows[:, None] + at_d[None, :], mask=present[:, None] & (at_d < D)[None, :],
            other=0.0
        )  # fmt: skip
        logits = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
        factor = scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1); the factors of both sides are in `scale` and `softcap`.
            logits = 1.0 - 2.0 / (tl.exp2(logits * scale) + 1.0)
            factor = softcap
        logits = logits * factor
        live = present[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            live = live & (key[None, :] > position[:, None] - window)
        logits = tl.where(live, logits, float("-inf"))
        if KEEP:
            tl.store(
                kept[:, None] + place[None, :],
                logits,
                mask=alive[:, None] & (place < stop)[None, :],
            )
        highest = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - highest[:, None])
        rescale = tl.exp2(top - highest)
        total = total * rescale + tl.sum(p, 1)
        top = highest
        values = widened(load_rows(v, v_rows, present, 0, BLOCK_E, E, True), queries)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=["rows", "q_len", "k_len", "places", "splits", "window",
"tokens_batch", "tokens_head",
                               "pages_width"])  # fmt: skip
def split_kernel(
    q, k, v, tokens, starts, ends, pages, tops, totals, partial, kept,
    scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, tokens_batch,
    tokens_head, pages_width,
    num_kv_heads, rows, q_len, k_len, places, splits, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr, WINDOW: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """One split of a KV head for ROWS of its query rows (Flash-Decoding; Dao et al., 2023).

    tops, totals (B, G, S, R) and partial (B, G, S, R, E) fp32: maximum (as a power of two), sum and
    unnormalised output. kept (B, G, R, N) fp32 if KEEP: the logits as powers of two, of places that
    some query sees.
    """
    split = tl.program_id(1)
    blocks = (rows + ROWS - 1) // ROWS
    kv = (tl.program_id(0) // blocks).to(tl.int64)
    batch = kv // num_kv_heads
    kv_head = kv % num_kv_heads
    first, end = _bounds(starts, ends, batch, q_len, k_len, window, STARTS, ENDS, WINDOW)

    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    head = kv_head * (rows // q_len) + row // q_len
    position = end - q_len + row % q_len
    at_d = tl.arange(0, BLOCK_D)
    at_e = tl.arange(0, BLOCK_E)
    q_rows = head * q_head + (row % q_len) * q_row
    queries = tl.load(
        q + batch * q_batch + q_rows[:, None] + at_d[None, :],
        mask=alive[:, None] & (at_d < D)[None, :],
        other=0.0,
    )
    k += kv_head * k_head
    v += kv_head * v_head
    if PAGE == 0:
        k += batch * k_batch
        v += batch * v_batch
    else:
        pages += batch * pages_width
    begin = first
    stop = end
    if TOKENS:
        tokens += batch * tokens_batch + kv_head * tokens_head
        begin = 0
        # They ascend: no more than `end` of them lie before it, and those come first.
        stop = tl.minimum(places, end)
    share = (tl.maximum(stop - begin, 0) + splits - 1) // splits
    share = (share + KEYS - 1) // KEYS * KEYS
    begin += split * share
    stop = tl.minimum(stop, begin + share)
    kept += (kv * rows + row) * places
    acc, top, total = _keys(
        queries, k, v, tokens, pages, kept, scale, softcap, row, alive, position, first, end,
        begin, stop, window,
        k_batch, k_row, v_batch, v_row,
        D, BLOCK_D, E, BLOCK_E, ROWS, KEYS, STAGES, PAGE, SOFTCAP, PRECISION, TOKENS, WINDOW, KEEP,
    )  # fmt: skip
    to = (kv * splits + split) * rows + row
    tl.store(tops + to, top, mask=alive)
    tl.store(totals + to, total, mask=alive)
    tl.store(
        partial + to[:, None] * E + at_e[None, :], acc, mask=alive[:, None] & (at_e < E)[None, :]
    )


@triton.jit(do_not_specialize=["rows", "q_len", "k_len", "places", "window"])
def score_kernel(
    kept, lse, starts, ends, scores, num_kv_heads, rows, q_len, k_len, places, window,
    KEYS: tl.constexpr, LARGEST: tl.constexpr,
    TOKENS: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Scores (B, G, N) of KEYS places: probabilities added up, or the LARGEST of them."""
    kv = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    first, end = _bounds(
        starts, ends, kv // num_kv_heads, q_len, k_len, window, STARTS, ENDS, WINDOW
    )
    written = (place < places) & (place < end)
    if not TOKENS:
        written = written & (place >= first)
    score = tl.zeros([KEYS], tl.float32)
    for row in range(rows):
        at = kv * rows + row
        logit = tl.load(kept + at * places + place, mask=written, other=float("-inf"))
        p = tl.where(logit == float("-inf"), 0.0, tl.exp2(logit - tl.load(lse + at) * LOG2E))
        if LARGEST:
            score = tl.maximum(score, p)
        else:
            score += p
    tl.store(scores + kv * places + place, score, mask=place < places)


@triton.jit(do_not_specialize=["q_len", "k_len"])
def column_sums_kernel(
    q, k, lse, scores, scale, softcap,
    q_batch, q_head, q_row, k_batch, k_head, k_row, num_kv_heads, group, q_len, k_len,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (B, G, K) fp32: each key's probabilities in all queries of a KV head's query heads.

    A program has KEYS keys to itself and walks the queries that see them, so that no order of
    programs shows in a sum. Programs of one KV head run side by side and read its queries while the
    L2 cache has them, the longest first.
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
